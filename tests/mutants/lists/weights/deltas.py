"""Of deltas of packed tensors."""

from __future__ import annotations

from ...mutant import mutant

MUTANTS = (
    mutant(
        "deltas-on-any-base",
        "weights/delta_sources.py",
        "if it.codec in WITH_BASE and found not in (it.base, it.target):",
        "if it.codec in WITH_BASE and not found:",
        "a model takes deltas that were not made from it",
        "nn/test_add_deltas.py",
    ),
    mutant(
        "a-copy-goes-by-the-model-s-name",
        "weights/changed.py",
        "        return Changed(start, {UNNAMED: Variant(start, changes)}, ALWAYS)\n\n    def require",
        "        return Changed(start, self.variants, self.active_delta)\n\n    def require",
        "a copied block changes when the model it was copied from is told to",
        "nn/test_modules_with_deltas.py",
    ),
    mutant(
        "the-second-round-of-changes-is-the-first",
        "weights/changed.py",
        "    for found in zip_longest(*each):\n",
        "    for found in zip(*each):\n",
        "of weights with different numbers of updates some are left out",
        "nn/test_updates.py",
    ),
    mutant(
        "changes-begin-where-they-do",
        "weights/coded.py",
        "room[at : at + it.nbytes] = it.view(np.uint8)",
        "room[at : at + it.nbytes // 2] = it.view(np.uint8)[: it.nbytes // 2]",
        "kernels read half of where changes lie",
        "nn/test_deltas.py",
    ),
    mutant(
        "rows-have-a-change-too-many",
        "weights/changed_rows.py",
        "        columns = torch.where(there, columns, self._width)\n",
        "        columns.clamp_(max=self._width)\n",
        "a row takes changes of the next one",
        "unit/test_coded.py",
    ),
    mutant(
        "updates-pile-up",
        "weights/apply_delta.py",
        "    if len(now.changes) > _UPDATES or _bytes(now.changes) > SPARSE_SHARE * source.nbytes:\n",
        "    if not now.changes:\n",
        "a weight that is updated for long takes more than the plain one",
        "nn/test_updates.py",
    ),
)
