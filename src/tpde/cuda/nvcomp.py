"""nvCOMP, which decodes zstd frames on a GPU, from NVIDIA's wheels.

Its Python API is used as it is in 5.2 and later, and in 6. It waits for the stream at each call, so nothing
here can be captured into a CUDA graph. Where it is missing or fails, the caller decodes on the CPU; the first
time there is a warning that says why, and nvCOMP is left alone from then on.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

OLDEST, NEWEST = (5, 2), 6  # 5.1 cannot decode into memory that is given; each major changed the API
INSTALL = "pip install 'tpde[nvcomp]' (or 'tpde[nvcomp-cu12]' beside CUDA 12)"


def _load() -> Any:
    return importlib.import_module("nvidia.nvcomp")


class _Memory:
    """Device memory as nvCOMP takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Nvcomp:
    """nvCOMP in this process, until it fails.

    Parameters
    ----------
    load : callable, optional
        Gives its module, or raises what is wrong with it; asked once, when it is wanted.
    """

    def __init__(self, load: Callable[[], Any] = _load) -> None:
        self._load, self._given_up = load, False
        self._module: Any = None
        self._lock = threading.Lock()  # codecs are shared by all threads that use their stream
        self._codec = functools.lru_cache(maxsize=16)(self._make)

    def available(self) -> bool:
        """Whether it is there and has not failed; warns the first time if not."""
        if self._module is None and not self._given_up:
            try:
                self._module = self._checked()
            except ImportError as error:
                self.give_up(str(error))
        return not self._given_up

    def give_up(self, why: str) -> None:
        """Warn, the first time; the CPU decodes from now on."""
        if not self._given_up:
            self._given_up = True
            warnings.warn(
                f"{why}; zstd blobs are decoded on the CPU and copied to the GPU from now on",
                RuntimeWarning,
                stacklevel=4,
            )

    def _checked(self) -> Any:
        """Its module; an `ImportError` says what is wrong with it."""
        try:
            found = self._load()
        except ImportError as error:
            what = f"nvCOMP, which decodes zstd on the GPU, is not installed ({error}): {INSTALL}"
            raise ImportError(what) from None
        except Exception as error:  # its library may fail to load in any way
            raise ImportError(f"nvCOMP cannot be used ({type(error).__name__}: {error})") from None
        version = tuple(int(part) for part in found.__version__.split(".")[:2])
        if version < OLDEST or version[0] > NEWEST:
            needed = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST}.x"
            raise ImportError(f"nvCOMP {found.__version__} has another Python API than {needed}: {INSTALL}")
        return found

    def _make(self, device: int, stream: int) -> Any:
        return self._module.Codec(
            algorithm="Zstd",
            bitstream_kind=self._module.BitstreamKind.RAW,
            device_id=device,
            cuda_stream=stream or 1,  # 1: the legacy default stream, where 0 might stand for none given
        )

    def decode(
        self,
        source: int,
        offsets: list[int],
        sizes: list[int],
        out: int,
        places: list[int],
        contents: list[int],
        device: int,
        stream: int,
    ) -> None:
        """Decode zstd frames from device memory into device memory, where it is available.

        Parameters
        ----------
        source : int
            Address that `offsets` count from.
        offsets, sizes : list of int
            Where each frame lies.
        out : int
            Address that `places` count from.
        places, contents : list of int
            Where each frame's content goes, and its size.
        device, stream : int
            The device's number, and the stream's handle.

        Raises
        ------
        Exception
            Whatever nvCOMP raises. That it raises nothing does not tell that the content is right.
        """
        if not offsets:
            return
        nvcomp = self._module
        with self._lock:
            codec = self._codec(device, stream)
            if hasattr(nvcomp, "BatchArray"):  # 6.x carves one buffer
                whole = _Memory(source, max(map(sum, zip(offsets, sizes, strict=True))))
                room = _Memory(out, max(map(sum, zip(places, contents, strict=True))))
                codec.decode(
                    nvcomp.as_arrays(whole, offsets, sizes), out=nvcomp.as_arrays(room, places, contents)
                )
            else:  # 5.x takes lists
                frames = [_Memory(source + at, size) for at, size in zip(offsets, sizes, strict=True)]
                targets: list[object] = [_Memory(out + at, n) for at, n in zip(places, contents, strict=True)]
                codec.decode(nvcomp.as_arrays(frames), out=targets)
