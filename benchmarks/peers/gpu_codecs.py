"""The contestants of `gpu_decode` that are not ours."""

from __future__ import annotations

from typing import Any


class Copy:
    """A copy from device memory to device memory: nothing that writes the output is faster."""

    def __init__(self, source: Any, out: Any) -> None:
        self._source, self._out, self.stored = source, out, source.numel()

    def __call__(self) -> Any:
        """Enqueue it."""
        self._out.copy_(self._source)
        return self._out


class Nvcomp:
    """nvCOMP's Python API in its own container (chunks of 64 KiB); a list of tensors is one batch."""

    def __init__(
        self, algorithm: str, data_types: tuple[str, ...], source: Any, out: Any, parts: int
    ) -> None:
        import torch
        from nvidia import nvcomp

        self._out, step = out, source.numel() // parts
        stream = torch.cuda.current_stream().cuda_stream or 1
        problem: Exception | None = None
        for data_type in data_types:
            try:
                options = {"data_type": data_type} if data_type else {}
                self._codec = nvcomp.Codec(algorithm=algorithm, cuda_stream=stream, **options)
                if parts == 1:
                    self._coded = self._codec.encode(nvcomp.as_array(source))
                    sizes = [self._coded.buffer_size]
                    self._target = out  # an array of its own would be given other memory
                else:
                    cuts = [source[at : at + step] for at in range(0, source.numel(), step)]
                    self._coded = self._codec.encode(nvcomp.as_arrays(cuts))
                    sizes = [each.buffer_size for each in self._coded]
                    self._pieces = [out[at : at + step] for at in range(0, out.numel(), step)]
                    batch = hasattr(nvcomp, "BatchArray")
                    self._target = nvcomp.as_arrays(self._pieces) if batch else self._pieces
                torch.cuda.synchronize()
                self._config = self._codec.decompression_config(self._coded)
                break
            except Exception as error:  # what a version cannot take, the next data type may
                problem = error
        else:
            raise problem or ValueError("nothing to try")
        self.stored = sum(sizes)

    def __call__(self) -> Any:
        """Decode; the configuration is made already, so that nothing waits for the device."""
        self._codec.decode(self._coded, out=self._target, decompression_config=self._config)
        return self._out


class EntroPack:
    """EntroPack's lossless scheme. It returns new memory, which torch's allocator keeps ready."""

    def __init__(self, tensors: list[Any]) -> None:
        import entropack

        self._decompress, self._config = entropack.decompress, entropack.TileANSConfig()
        self._coded = [entropack.compress(tensor, self._config) for tensor in tensors]
        if any(coded.header["compress_method"] == "raw" for coded in self._coded):
            raise ValueError(str(self._coded[0].header.get("reason", "stored raw"))[:80])
        self.stored = sum(coded.storage_nbytes() for coded in self._coded)

    def __call__(self) -> Any:
        """Decode all."""
        import torch

        made = [self._decompress(coded, self._config) for coded in self._coded]
        if len(made) == 1:
            return made[0]
        return _Several([tensor.reshape(-1).view(torch.uint8) for tensor in made])


class _Several(list[Any]):
    """Tensors that are one only when they are compared."""

    def reshape(self, _: int) -> Any:
        """All behind one another."""
        import torch

        return torch.cat(list(self))
