"""Kernels are compiled once, kept on disk under all that they depend on, and prepared: all without CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.backends import MadeBackend
from support.cuda_modules import Code, Machine
from support.emulated import CPU

from tpde.codec.native import MOST_PARAMETERS, CoreLaunch, core
from tpde.cuda.backend import current, launching_on
from tpde.cuda.compile import Nvrtc, cache_directory
from tpde.cuda.product_ways import KERNELS
from tpde.cuda.tuning import table_of
from tpde.errors import MissingDependency, UnsupportedDevice
from tpde.io.sinks import FileSink

DEFINES = {"WORD": 2, "CHECK": 1}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("TPDE_CACHE_DIR", str(tmp_path / "kept"))
    return Machine(monkeypatch)


# ---- on disk ----


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TPDE_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/other")
    assert cache_directory() == Path("/one")
    monkeypatch.setenv("TPDE_CACHE_DIR", "")
    assert cache_directory() == Path("/other/tpde")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == tmp_path / ".cache" / "tpde"
    monkeypatch.delenv("TPDE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / ".cache" / "tpde"


def test_nothing_is_kept_for_a_user_without_a_home(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> Any:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "TPDE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(RuntimeWarning, match="cannot be kept in .* set TPDE_CACHE_DIR"):
        assert machine.cubins.get("decode.cu", DEFINES, "sm_86")
    assert not table_of(CPU, KERNELS).choices


def _kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept" / "kernels").iterdir())


def test_an_entry_is_a_hash_and_a_kernel(machine: Machine, tmp_path: Path) -> None:
    made = machine.cubins.get("decode.cu", DEFINES, "sm_86")
    assert machine.cubins.get("decode.cu", dict(reversed(DEFINES.items())), "sm_86") == made
    assert len(machine.compiled) == 1
    [entry] = _kept(tmp_path)
    assert entry.suffix == ".cubin"
    assert entry.read_bytes() == hashlib.sha256(made).digest() + made
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["source", "defines", "architecture", "compiler", "text"])
def test_whatever_a_kernel_depends_on_makes_another_entry(
    what: str, machine: Machine, tmp_path: Path
) -> None:
    source, defines, arch = "decode.cu", DEFINES, "sm_86"
    machine.cubins.get(source, defines, arch)
    if what == "source":
        source = "merge.cu"
    elif what == "defines":
        defines = {**DEFINES, "CHECK": 0}
    elif what == "architecture":
        arch = "sm_90"
    elif what == "compiler":
        machine.version = (13, 2)
    else:
        machine.text = "other"
    machine.cubins.get(source, defines, arch)
    assert len(machine.compiled) == len(_kept(tmp_path)) == 2


def test_a_damaged_entry_is_written_again(machine: Machine, tmp_path: Path) -> None:
    made = machine.cubins.get("decode.cu", DEFINES, "sm_86")
    [entry] = _kept(tmp_path)
    whole = entry.read_bytes()
    nothing = hashlib.sha256(b"").digest()  # the right hash of no kernel
    for number, damaged in enumerate((b"", whole[:31], nothing, whole[:-1], whole + b"\0", bytes(32) + made)):
        entry.write_bytes(damaged)
        assert machine.cubins.get("decode.cu", DEFINES, "sm_86") == made
        assert len(machine.compiled) == number + 2
        assert entry.read_bytes() == whole
    assert _kept(tmp_path) == [entry]


@pytest.mark.parametrize("what", ["pipe", "endless", "huge", "folder"])
def test_what_is_no_entry_is_neither_waited_for_nor_read(what: str, machine: Machine, tmp_path: Path) -> None:
    made = machine.cubins.get("decode.cu", DEFINES, "sm_86")
    [entry] = _kept(tmp_path)
    entry.unlink()
    if what == "pipe":
        os.mkfifo(entry)
    elif what == "endless":
        entry.symlink_to("/dev/zero")
    elif what == "huge":
        entry.touch()
        os.truncate(entry, 1 << 40)
    else:
        entry.mkdir()
    kept = what == "huge"
    with contextlib.nullcontext() if kept else pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert machine.cubins.get("decode.cu", DEFINES, "sm_86") == made
    assert len(machine.compiled) == 2
    assert entry.is_file() == kept


def test_a_write_that_fails_leaves_nothing(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSink, "write", full)
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert machine.cubins.get("decode.cu", DEFINES, "sm_86")
    assert _kept(tmp_path) == []


# ---- on a device ----


def test_a_kernel_is_prepared_once(machine: Machine) -> None:
    made = machine.backend.kernel("decode.cu", "decode_rows", DEFINES, 2)
    assert machine.compiled == [("decode.cu", DEFINES, "sm_86")]
    (load, code, name, on), function, attribute = machine.asked
    assert (load, name, on) == ("load", "decode.cu", 2)
    assert code == machine.cubins.get("decode.cu", DEFINES, "sm_86")
    assert function == "decode_rows"
    assert attribute == ("room", (99 << 10) - 144, "kernel 7", 2), "what is static takes from the same memory"
    assert machine.current == 5, "the context that was current is so again"
    assert machine.backend.kernel("decode.cu", "decode_rows", dict(reversed(DEFINES.items())), 2) is made
    assert len(machine.asked) == 3
    machine.backend.kernel("decode.cu", "decode_rows", DEFINES, 1)
    machine.backend.kernel("decode.cu", "decode_items", DEFINES, 1)
    assert len(machine.asked) == 9


def test_a_kernel_that_cannot_be_loaded_restores_the_context(machine: Machine) -> None:
    machine.broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no kernel image"):
            machine.backend.kernel("decode.cu", "decode_items", DEFINES, 0)
        assert machine.current == 5
    machine.broken = False
    assert machine.backend.kernel("decode.cu", "decode_items", DEFINES, 0)


@pytest.mark.parametrize(
    ("driver", "good"), [((12, 8), False), ((13, 0), True), ((13, 2), True), ((14, 0), True)]
)
def test_a_driver_older_than_the_compiler(driver: tuple[int, int], good: bool, machine: Machine) -> None:
    machine.driver_version = driver
    if good:
        assert machine.backend.kernel("decode.cu", "decode_items", DEFINES, 0)
        return
    with pytest.raises(
        UnsupportedDevice, match=r"supports CUDA 12.8, the installed NVRTC is of CUDA 13.1"
    ) as it:
        machine.backend.kernel("decode.cu", "decode_items", DEFINES, 0)
    assert (it.value.found, it.value.needed) == ((12, 8), (13, 1))
    assert "cuda-bindings<13" in str(it.value.hint)
    assert not machine.compiled


def test_two_threads_compile_and_load_a_kernel_once(machine: Machine) -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(machine.backend.kernel("merge.cu", "merge", DEFINES, 0))
    )

    def during() -> None:
        machine.during = None
        thread.start()
        thread.join(0.05)  # it would be through by then, if it did not wait

    machine.during = during
    made = machine.backend.kernel("merge.cu", "merge", DEFINES, 0)
    thread.join(20)
    assert found == [made]
    assert len(machine.compiled) == 1
    assert sum(it[0] == "load" for it in machine.asked) == 1


def test_different_kernels_are_compiled_at_a_time(machine: Machine) -> None:
    meet = threading.Barrier(2)
    machine.during = lambda: meet.wait(20)  # which raises if they came one after the other
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda n: machine.backend.kernel("merge.cu", "merge", {"N": n}, 0), range(2)))
    assert len(machine.compiled) == 2


def test_kernels_of_one_file_are_compiled_once(machine: Machine) -> None:
    names = [f"name {i}" for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: machine.backend.kernel("merge.cu", name, DEFINES, 0), names))
    assert len(machine.compiled) == 1


def test_launches(machine: Machine) -> None:
    made = machine.backend.kernel("decode.cu", "decode_rows", DEFINES, 0)
    machine.asked.clear()
    start = made.launch(3, 64, 1000)
    go = start.bind(0, 5, (1 << 32) - 1)
    assert machine.asked == []
    go()
    go()
    start(77, 6, 1 << 32)
    of = (3, 1, 1), (64, 1, 1), 1000
    legacy = (*of, None, [], [5, (1 << 32) - 1])
    assert machine.asked == [legacy, legacy, (*of, 77, [], [6, 0])]
    made.launch(16, 64, 1000, cluster=8, early=True).bind(0, 1, 2)()
    assert machine.asked[-1] == ((16, 1, 1), *of[1:], None, [(6, [1]), (4, [8, 1, 1])], [1, 2])
    made.launch(16, 64, 1000, early=True)(0, *range(MOST_PARAMETERS))
    assert machine.asked[-1] == ((16, 1, 1), *of[1:], None, [(6, [1])], [0, 1])


@pytest.mark.parametrize("values", [[-1], [1 << 64], [0.5], ["1"]])
def test_parameters_are_integers(machine: Machine, values: list[Any]) -> None:
    made = machine.backend.kernel("decode.cu", "decode_rows", DEFINES, 0).launch(3, 64, 1000)
    machine.asked.clear()
    with pytest.raises(struct.error):
        made(0, *values)
    with pytest.raises(IndexError):
        made.bind(0, *[0] * (MOST_PARAMETERS + 1))
    assert machine.asked == []


def test_the_core_takes_no_more_parameters_than_it_has_room_for(machine: Machine) -> None:
    how = CoreLaunch(driver=1, kernel=7, grid=1, block=1)  # nothing at that address would run
    assert core().tpde_launch_start(ctypes.addressof(how), 0, bytes(264), 264) == -1


def test_a_launch_that_fails_names_the_kernel(machine: Machine) -> None:
    start = machine.backend.kernel("decode.cu", "decode_rows", DEFINES, 0).launch(3, 64, 1000)
    for code, name in ((700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (12345, "an error without a name here")):
        machine.refused = code
        with pytest.raises(RuntimeError, match=rf"decode_rows failed: {name} \({code}\); an earlier kernel"):
            start(0, 1, 2)


@pytest.mark.parametrize(("before", "after"), [(0, 3), (5, 5)])
def test_a_thread_without_a_context_gets_the_devices(machine: Machine, before: int, after: int) -> None:
    """As PyTorch's for backward passes, when a packed layer's is the first launch there."""
    made = machine.backend.kernel("decode.cu", "decode_rows", DEFINES, 3)
    start = made.launch(3, 64, 1000)
    for go in (start.bind(0, 1, 2), lambda: start(0, 1, 2), lambda: made.clusters_at_once(8, 64, 1000)):
        machine.current, thread = before, threading.Thread(target=lambda go=go: (go(), go()))
        thread.start()
        thread.join()
        assert machine.current == after


def test_clusters_that_run_at_a_time(machine: Machine) -> None:
    made = machine.backend.kernel("decode.cu", "decode_rows", DEFINES, 3)
    assert made.clusters_at_once(8, 64, 1000) == 15
    given = {"grid": 1, "cluster": 8, "block": 64, "shmem_size": 1000}
    assert machine.asked[-1] == ("occupancy", given, "legacy", 3)  # on the kernel's device
    assert machine.current == 5


# ---- which one ----


def test_another_back_end_runs_kernels_within_a_context_only() -> None:
    before, other = current(), MadeBackend()
    with launching_on(other):
        assert current() is other
        with pytest.raises(RuntimeError, match="out"), launching_on(before):
            raise RuntimeError("out" if current() is before else "not there")
        assert current() is other
    assert current() is before


# ---- the compiler ----


def _compiler(answer: Any) -> Nvrtc:
    def version() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Nvrtc(SimpleNamespace(nvrtcVersion=version))


def test_the_compilers_version() -> None:
    with pytest.raises(MissingDependency, match=r"not found \(libnvrtc.so.13\)") as caught:
        _compiler(RuntimeError("libnvrtc.so.13")).version()
    assert "nvidia-cuda-nvrtc" in str(caught.value.hint)
    with pytest.raises(MissingDependency, match="NVRTC does not work: SOME_ERROR"):
        _compiler((Code(5), 0, 0)).version()
    assert _compiler((Code(0), 13, 2)).version() == (13, 2)
