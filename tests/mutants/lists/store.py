"""Of `store`: states, deltas, and live tensors."""

from __future__ import annotations

from ..mutant import mutant

_LIVE = "integration/test_live_deltas.py"

MUTANTS = (
    mutant(
        "any-base-will-do",
        "store/live.py",
        "if it.codec in WITH_BASE and found != it.base:",
        "if it.codec in WITH_BASE and not it.base:",
        "a delta is applied to tensors that it was not made from",
        _LIVE,
    ),
    mutant(
        "targets-are-changed-again",
        "store/live.py",
        "        if found != it.target:\n",
        "        if True:\n",
        "a delta that was applied, or interrupted, is refused the second time",
        _LIVE,
    ),
    mutant(
        "tensors-are-written-as-they-come",
        "store/live.py",
        "old.copy() if it.codec in WITH_BASE else None",
        "old if it.codec in WITH_BASE else None",
        "tensors are changed before the others are checked",
        _LIVE,
    ),
    mutant(
        "ties-of-live-tensors-are-torn",
        "store/live.py",
        "if fingerprint(torch_bytes(view)) != it.entry.target:",
        "if view.numel() == 0:",
        "of two names of one memory the last one wins",
        _LIVE,
    ),
    mutant(
        "views-that-repeat-are-written",
        "store/live.py",
        "repeats = any(n > 1 and step == 0",
        "repeats = any(n < 1 and step == 0",
        "a tensor that cannot be written fails when others are",
        _LIVE,
    ),
    mutant(
        "one-memory-is-two-states",
        "store/live.py",
        "        _refuse_one_memory(before, after)\n",
        "",
        "a delta from a model to itself says that nothing changed",
        _LIVE,
    ),
    mutant(
        "packed-tensors-are-read",
        "store/live.py",
        "        if not _has_bytes(tensor):\n",
        "        if False:\n",
        "packed weights are decoded, and the delta applied to a copy",
        _LIVE,
    ),
    mutant(
        "tensors-in-any-order",
        "store/live.py",
        "parse_header(header, self.name).specs.items()",
        "specs.items()",
        "no file can be patched with a delta of live tensors",
        _LIVE,
    ),
    mutant(
        "autograd-is-not-told",
        "store/live.py",
        "        own = tensor.detach()\n",
        "        own = tensor.data\n",
        "gradients are computed with weights that were changed",
        _LIVE,
    ),
    mutant(
        "targets-are-not-checked",
        "store/delta.py",
        "if found != it.target:",
        "if not found:",
        "what a damaged delta makes is taken",
        "malformed/test_attacks_delta.py",
    ),
    mutant(
        "bases-are-not-checked",
        "store/delta.py",
        "            if found != it.base:",
        "            if not found:",
        "a delta is applied to another base",
        "integration/test_deltas.py",
    ),
    mutant(
        "chains-come-back",
        "store/delta.py",
        "            if place in seen:",
        "            if place in ():",
        "a chain that ends in itself is followed to the limit",
        "integration/test_deltas.py",
    ),
)
