"""A model while transformers loads into it: packed parameters stay on the `meta` device and out of its sight.

transformers gives every parameter of `state_dict()` that its own reading does not fill memory and random
numbers. Those that are packed are left out of the state dict, and marked as initialised. Tying goes on as
usual, by their names; right after it they become packed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tpde.format.constants import SUFFIX
from tpde.integrations.transformers.internals import ignore_keys, mark_initialized


class Placeholders:
    """Hides parameters of a model until its weights are tied.

    Parameters
    ----------
    model : PreTrainedModel
        Being loaded.
    names : iterable of str
        Of its parameters and buffers that transformers shall not load.
    seen : iterable of str
        Those for which some of the files' tensors are plain: transformers would call these unexpected.
    done : callable
        Called right after the tying, when nothing is hidden any more.

    Attributes
    ----------
    written : list of str
        Those that transformers wrote to, though they are marked as initialised: some models' `_init_weights`
        asks for no mark where it writes to a part of a weight. What goes through `.data` is not noticed.
    """

    def __init__(
        self, model: Any, names: Iterable[str], seen: Iterable[str], done: Callable[[], None]
    ) -> None:
        self._model, self._names, self._done = model, frozenset(names), done
        self.written: list[str] = []
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}
        for name in self._names:
            path, _, leaf = name.rpartition(".")
            held = getattr(model.get_submodule(path), leaf)
            mark_initialized(held)
            if held.is_meta and not held.is_inference():  # those count no versions
                self._versions[name] = held, held._version
        register = getattr(model, "register_state_dict_post_hook", None) or model._register_state_dict_hook
        hidden = self._names

        def hide(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name in hidden:
                state.pop(prefix + name, None)

        self._hook = register(hide)
        # Blobs are unexpected, too.
        alike = "|".join(re.escape(name) for name in seen)  # one pattern: each is tried with each tensor
        self._ignored = ignore_keys(model, [f"{SUFFIX}$", *([rf"(^|\.)({alike})$"] if alike else [])])
        tie = model.tie_weights

        @functools.wraps(tie)
        def tie_weights(*args: Any, **kwargs: Any) -> Any:
            result = tie(*args, **kwargs)
            self.finish()
            return result

        model.tie_weights = tie_weights

    def finish(self) -> None:
        """Show the parameters again, and say so. Once; later calls do nothing."""
        if self._model.__dict__.pop("tie_weights", None) is not None:
            self._hook.remove()
            self.written = sorted(name for name, (it, was) in self._versions.items() if it._version != was)
            self._versions = {}
            self._done()

    def close(self) -> None:
        """Undo everything: loading is over, and so is its report of unexpected names."""
        self.finish()
        self._ignored()
