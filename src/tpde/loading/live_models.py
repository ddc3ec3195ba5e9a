"""`tpde.pack_module` and `tpde.unpack_module`: models of any library, packed in memory and turned back."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

from torch import nn

from tpde.errors import MissingDependency
from tpde.nn.pack_model import MIN_BYTES
from tpde.nn.pack_model import pack_module as _pack
from tpde.nn.pack_model import unpack_module as _unpack


def pack_module(model: nn.Module, *, threads: int | None = None, min_bytes: int = MIN_BYTES) -> nn.Module:
    """Pack the weights of a live model, in place, without changing a bit of what it computes.

    Packed are the floating-point weights of linear layers, embeddings, convolutions, transformers' `Conv1D`
    and fused experts, where that makes them smaller; other parameters stay as they are. If most of the
    model is frozen and the rest is not, as with adapters, only what is frozen is packed: packed weights
    cannot be trained.

    If nothing is packed, the logger `tpde` warns and says why. At level `INFO` it tells how many parameters
    are no longer trained.

    `save_pretrained` of a model of transformers or diffusers then writes a packed directory, as of one that
    was loaded packed.

    On a GPU, weights of up to 256 MiB in all are packed at a time, or a larger one by itself, and then no
    longer there as plain ones: what PyTorch keeps of their memory, the device has back.

    Parameters
    ----------
    model : nn.Module
        On any devices.
    threads : int, optional
        Of the host, which encode weights that are there, and choose codes for those on a GPU, which encodes
        them. By default one for each processor.
    min_bytes : int
        Smaller parameters stay plain.

    Returns
    -------
    nn.Module
        `model`; `unpack_module` is the inverse.

    Raises
    ------
    InvalidArgument
        If it is no module, or has a parameter without a shape yet. If `threads` or `min_bytes` is no number
        of such.

    Examples
    --------
    >>> model = tpde.pack_module(model)  # doctest: +SKIP
    >>> model(ids).logits  # the same bits as before  # doctest: +SKIP
    """
    _pack(model, threads=threads, min_bytes=min_bytes)
    _tell("adopt", model)
    return model


def unpack_module(model: nn.Module) -> nn.Module:
    """Turn a packed model back, in place: the exact inverse of `pack_module`.

    A model of transformers or diffusers that was loaded packed is an ordinary one then: `save_pretrained`
    writes a plain directory.

    Parameters
    ----------
    model : nn.Module
        A packed model, or a part of one.

    Returns
    -------
    nn.Module
        `model`, with the classes, parameters, ties and `requires_grad` that it had.

    Raises
    ------
    InvalidArgument
        If it is no module.
    Corrupt
        If a blob is damaged. The modules before it are plain by then.
    PackedWeight
        If weights are streamed under a VRAM budget, for which they would be too large; if one is tied to a
        weight outside of `model`. Nothing is unpacked then.

    Examples
    --------
    >>> model = tpde.unpack_module(model)  # doctest: +SKIP
    """
    _unpack(model)
    _tell("release", model)
    return model


# Modules that define libraries' models, the class of all of these, and what of ours is told.
_LIBRARIES = (
    ("transformers.modeling_utils", "PreTrainedModel", "tpde.integrations.transformers.adopt"),
    ("diffusers.models.modeling_utils", "ModelMixin", "tpde.integrations.diffusers.adopt"),
)


def _tell(what: str, model: nn.Module) -> None:
    """Tell the library of a model that was packed or unpacked, or of models in it."""
    for defining, base, ours in _LIBRARIES:
        kind = getattr(sys.modules.get(defining), base, None)
        if kind is not None and any(isinstance(it, kind) for it in model.modules()):
            with suppress(MissingDependency):  # one that is too old to load packed models
                getattr(importlib.import_module(ours), what)(model)
