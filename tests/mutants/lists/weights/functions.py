"""Of what others may do with packed weights: functions, parameters, compiled code."""

from __future__ import annotations

from ...mutant import mutant

MUTANTS = (
    mutant(
        "arrays-of-weights-can-be-changed",
        "weights/lent.py",
        "        array.flags.writeable = False\n",
        "",
        "NumPy changes a copy of a weight, and nobody is told",
        "nn/test_changes_within.py",
    ),
    mutant(
        "lent-weights-are-copied-as-they-are",
        "weights/lent.py",
        "    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:\n",
        "    def _deepcopy(self, memo: dict[int, object]) -> Tensor:\n",
        "a copy of a weight that was read in a forward pass cannot be changed",
        "nn/test_changes_within.py",
    ),
    mutant(
        "changes-by-functions-are-missed",
        "weights/functions.py",
        "        if copy._version != version:\n            raise refuse_change(name, function_name(func))\n",
        "        if copy._version < version:\n            raise refuse_change(name, function_name(func))\n",
        "a function that changes a weight changes a copy that is lost",
        "nn/test_parameter_changes.py",
    ),
    mutant(
        "out-is-a-packed-weight",
        "weights/functions.py",
        '    out = kwargs.get("out")\n',
        '    out = kwargs.get("out_")\n',
        "`out=weight` writes to a copy that is lost",
        "nn/test_parameter_changes.py",
    ),
    mutant(
        "freezing-is-not-told",
        "weights/functions.py",
        "        weight.packed.tell_frozen()\n",
        "",
        "views of a frozen weight still ask for gradients",
        "nn/test_parameters.py",
    ),
    mutant(
        "packed-weights-are-trained",
        "weights/functions.py",
        "    if requires_grad:\n        raise PackedWeight(",
        "    if not requires_grad:\n        raise PackedWeight(",
        "training a packed weight does nothing, silently",
        "nn/test_training.py",
    ),
    mutant(
        "equal-values-are-close-values",
        "weights/parameter.py",
        "return torch.equal(mine.view(word), theirs.view(word))",
        "return torch.equal(mine, theirs)",
        "zeros of another sign are loaded without a word, and NaN are refused",
        "nn/test_loading_blobs.py",
    ),
    mutant(
        "pickled-formats-are-not-checked",
        "weights/parameter.py",
        "    if known is None or known[1] not in (0, len(packed.shape)):\n",
        "    if known is None:\n",
        "a damaged pickle raises an error that is none of ours",
        "nn/test_parameter_pickles.py",
    ),
    mutant(
        "read-only-pieces-are-changed",
        "weights/readonly.py",
        "                if it._version != version:\n",
        "                if it._version < version:\n",
        "a piece of a decoded copy is changed, and the change is lost",
        "nn/test_attacks.py",
    ),
    mutant(
        "in-place-dunders-are-none",
        "weights/readonly.py",
        "return in_place or name in _DUNDERS or name ==",
        "return in_place or name ==",
        "`weight += 1` changes a copy that is lost",
        "nn/test_parameter_changes.py",
    ),
    mutant(
        "a-key-outlives-its-unit",
        "weights/operators.py",
        "    if unit is None:\n        raise InvalidInput(",
        "    if unit is None and not key:\n        raise InvalidInput(",
        "a compiled graph of a model that is gone raises an error that is none of ours",
        "unit/test_ops.py",
    ),
    mutant(
        "compiled-code-keeps-the-workspace",
        "weights/operators.py",
        "    unit = _unit(key)\n    unit.release()\n",
        "    unit = _unit(key)\n",
        "compiled code has a second buffer beside the workspace",
        "nn/test_loading_blobs.py",
    ),
)
