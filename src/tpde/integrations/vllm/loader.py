"""Files of models as vLLM's loaders read them, tensor by tensor: packed ones decoded, by several threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import DefaultModelLoader, DummyModelLoader, register_model_loader

from tpde.files.checked_reads import check_plain
from tpde.files.reader import PackedFile
from tpde.format.constants import METHOD, SUFFIX
from tpde.integrations.vllm import internals, refusals
from tpde.integrations.vllm.adjacent_tensors import AdjacentTensors, BoundedRoom, adjacent_of
from tpde.io.sources import BytesSource, Extent
from tpde.loading.reading import Reader
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.resident import Resident

_GROUP_BYTES = 128 << 20  # of tensors that are on their way to the device while others are taken
Named = tuple[str, Tensor]

_registered = False


def unpacked(weights: Iterable[Named], *, whole: bool = False) -> Iterator[Named]:
    """Tensors of files, those that are packed decoded, under their names in the source.

    Blobs are decoded on the device that the model is loaded to. They are copied there by several threads,
    which vLLM's iterators leave to one: their tensors are mapped files. Blobs of up to 256 MiB, or of two
    tensors, are there beside what the device has for a layer.

    Parameters
    ----------
    weights : iterable of (str, torch.Tensor)
        As vLLM's iterators give them.
    whole : bool
        Whether a model on a GPU takes all of them, and whole. Then threads copy plain tensors, too, of which
        up to 1.5 GiB are there at a time, and an eighth of what is free.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If a blob is damaged.
    """
    device = internals.load_device()
    bounded = BoundedRoom(device) if whole else None
    with Reader(device) as reader:
        before: _Group | None = None
        for group in _groups(weights):
            coming = _Group(group, reader, device, bounded)
            if before is not None:
                yield from before.given()
            before = coming
        if before is not None:
            yield from before.given()


def _is_packed(name: str, tensor: Tensor) -> bool:
    return name.endswith(SUFFIX) and tensor.itemsize == 1  # what holds bytes and is no blob, decoding refuses


def _is_mapped(name: str, tensor: Tensor) -> bool:
    blob = _is_packed(name, tensor) and tensor.dtype is torch.uint8 and tensor.dim() == 1
    return blob and tensor.device.type == "cpu"


def _groups(weights: Iterable[Named]) -> Iterator[list[Named]]:
    group: list[Named] = []
    size = 0
    for name, tensor in weights:
        group.append((name, tensor))
        size += tensor.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group


class _Group:
    """Tensors in their order, of which some are on their way to a device."""

    def __init__(
        self, weights: list[Named], reader: Reader, device: torch.device, bounded: BoundedRoom | None
    ) -> None:
        self._weights, self._together = weights, list[AdjacentTensors]()
        rooms, extents = list[Tensor](), list[Extent]()
        for number, (name, tensor) in enumerate(weights):
            if _is_mapped(name, tensor):
                room = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                rooms.append(room)
                source = BytesSource(tensor.contiguous().numpy(), name)
                extents.append(Extent(source, 0, tensor.numel(), name))
                weights[number] = name, room
        if bounded is not None:
            bounded.look()
            self._begin_plain(bounded, rooms, extents)
        self._reading = reader.begin(rooms, extents)

    def _begin_plain(self, bounded: BoundedRoom, rooms: list[Tensor], extents: list[Extent]) -> None:
        plain = {
            id(tensor): number
            for number, (name, tensor) in enumerate(self._weights)
            if not _is_packed(name, tensor)
        }
        self._together = adjacent_of([self._weights[number][1] for number in plain.values()])
        for it in self._together:
            room = bounded.room(it.nbytes)
            if room is None:
                continue
            rooms.append(room)
            extents.append(it.extent(self._weights[plain[id(it.tensors[0])]][0]))
            for tensor, view in zip(it.tensors, it.views(room), strict=True):
                number = plain[id(tensor)]
                self._weights[number] = self._weights[number][0], view

    def given(self) -> Iterator[Named]:
        """All, under their names in the source."""
        self._reading.wait()
        self._together.clear()
        while self._weights:  # what was decoded is given back
            name, tensor = self._weights.pop(0)
            if not _is_packed(name, tensor):
                yield name, tensor
                continue
            name = name.removesuffix(SUFFIX)
            made = PackedTensor(Resident(tensor, name)).decoded()
            del tensor
            yield name, made


def each_once(weights: Iterable[Named]) -> Iterator[Named]:
    """The tensors, of which plain layers take the last of a name; packed ones have the first by then.

    Raises
    ------
    InvalidInput
        If one comes a second time.
    """
    seen = set[str]()
    for name, tensor in weights:
        if name in seen:
            raise refusals.came_twice(name)
        seen.add(name)
        yield name, tensor


def register() -> None:
    """Have vLLM's own load formats, in this process, read by what decodes; and name one of ours."""
    global _registered  # noqa: PLW0603 - vLLM warns of a load format that comes a second time
    if not _registered:
        _registered = True
        with internals.no_warnings_of_loaders():
            for load_format in (METHOD, *internals.FORMATS):
                register_model_loader(load_format)(TpdeModelLoader)
            register_model_loader("dummy")(TpdeDummyLoader)


def other_names(model: Any, loaded: set[str]) -> set[str]:
    """All names of parameters that were loaded by one of them: parts of models are there under several."""
    names: dict[int, set[str]] = {}
    for name, it in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(it), set()).add(name)
    return {name for those in names.values() if those & loaded for name in those}


def count_values(model: Any) -> None:
    """Have layers count their values, if some are to be packed: of a draft, too, that says nothing of it."""
    methods = {type(getattr(it, "quant_method", None)).__module__ for it in model.modules()}
    if any(it.startswith(__package__) for it in methods):
        from tpde.integrations.vllm import before_reading

        before_reading.count_values(model)


class TpdeModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Reads the files of models as vLLM does; those of packed models decoded, before any name is looked at.

    Some models change weights by their names on the way, which a packed tensor's is not.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        if load_config.load_format == METHOD:
            load_config = dataclasses.replace(load_config, load_format="safetensors")
        super().__init__(load_config)
        self._is_packed = False  # the model whose files are read

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load a model's weights, and have vLLM look for those that no file has, as of plain models."""
        internals.note_loader()
        if model_config.quantization == METHOD:
            from tpde.integrations.vllm import before_reading

            internals.track_weights(self)
            before_reading.prepare(model)
            before_reading.count_plain(model)
        count_values(model)
        super().load_weights(model, model_config)

    def track_weights_loading(self, model: Any, loaded_weights: set[str] | None, **options: Any) -> None:
        """Look for weights that no file has: those that came by one of their names are there by all.

        A router that experts share has two, and vLLM asks for it by one only where models are quantized.
        """
        if loaded_weights is not None:
            loaded_weights |= other_names(model, loaded_weights)
        super().track_weights_loading(model, loaded_weights, **options)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """All tensors, those of packed models decoded."""
        self._is_packed = model_config.quantization == METHOD
        weights: Iterator[tuple[str, Tensor]] = super().get_all_weights(model_config, model)
        if not self._is_packed:
            return weights
        if internals.computes_with_tensors(model):
            return each_once((name, it.cpu()) for name, it in unpacked(weights))
        return each_once(unpacked(weights, whole=internals.takes_all_weights()))

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The files of a model; what is stored plain in those of packed ones is checked.

        Raises
        ------
        Corrupt
            Naming a plain tensor that is damaged: its hash is only in its file, which vLLM reads by itself.
        """
        made: tuple[Any, ...] = super()._prepare_weights(*args, **kwargs)
        _, files, are_safetensors = made[:3]
        if self._is_packed and are_safetensors:
            for path in files:
                with PackedFile(path) as file:
                    check_plain(file, file.specs)
        return made


class TpdeDummyLoader(DummyModelLoader):  # type: ignore[misc]
    """Gives models random weights as vLLM does, for measuring; there are no files to prepare for."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill a model, and have it refuse to be saved if its weights are packed."""
        internals.note_loader()
        from tpde.integrations.vllm import before_reading

        is_packed = model_config.quantization == METHOD
        if is_packed:
            before_reading.count_plain(model)
        count_values(model)
        super().load_weights(model, model_config)
        if is_packed:  # afterwards: vLLM 0.25 asks for state dicts
            before_reading.refuse_saving(model)
