"""Packed files as vLLM's loaders read plain ones: tensor by tensor, decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from tpde.format.constants import METHOD, SUFFIX
from tpde.integrations.vllm.internals import WeightsMapper
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.resident import Resident

_registered = False


def unpacked(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of files, those that are packed decoded, under their names in the source.

    Blobs are decoded on the device that PyTorch makes tensors on, which while vLLM loads is the model's.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If a blob is damaged.
    """
    for name, tensor in weights:
        if not name.endswith(SUFFIX) or tensor.dtype is not torch.uint8:
            yield name, tensor
            continue
        plain = name.removesuffix(SUFFIX)
        blob = tensor.to(torch.get_default_device())
        yield plain, PackedTensor(Resident(blob, plain)).decoded()


class Unpacking(WeightsMapper):  # type: ignore[misc]
    """A mapper of names that decodes what is packed before any name is mapped.

    vLLM joins it with those of the model, on either side.
    """

    def __or__(self, other: WeightsMapper) -> Unpacking:
        return _joined(super().__or__(other))

    def __ror__(self, other: WeightsMapper) -> Unpacking:
        return _joined(WeightsMapper.__or__(other, self))

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Decode, and map names."""
        return super().apply(unpacked(weights))  # type: ignore[no-any-return]


def _joined(mapper: WeightsMapper) -> Unpacking:
    return Unpacking(**{it.name: getattr(mapper, it.name) for it in dataclasses.fields(mapper)})


def register() -> None:
    """Name the load format to vLLM, in this process."""
    global _registered  # noqa: PLW0603 - vLLM warns of a load format that comes a second time
    if not _registered:
        _registered = True
        register_model_loader(METHOD)(TpdeModelLoader)


class TpdeModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """`--load-format tpde`: reads packed files for models that map names of weights by themselves."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

    def get_all_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """All tensors, decoded."""
        return unpacked(super().get_all_weights(*args, **kwargs))
