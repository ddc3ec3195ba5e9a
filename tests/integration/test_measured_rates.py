"""Rates of this machine's disk and host, as they are measured for a plan."""

import errno
import fcntl
import os
import threading

import pytest
from support.backends import MadeBackend
from support.models import torch

from tpde.errors import InvalidInput, ReadError
from tpde.streaming.rates import DiskSample, Meters, disk_rate, launch_seconds, measure_rates


def test_rates_of_a_disk_and_a_host(llama, tmp_path):
    assert disk_rate(sorted(llama.packed.glob("*.safetensors"))) > 1e6
    odd = tmp_path / "odd"
    odd.write_bytes(bytes(5_000_001))
    assert disk_rate([odd]) > 1e6
    assert 1e-6 < launch_seconds(torch.device("cpu"), 0.1) < 1e-2


def test_the_fastest_of_three_times_counts(launch_on):
    """Hosts with other work are slow for a while."""
    calls = iter([3e-5, 1e-5, 2e-5])
    launch_on(MadeBackend())
    meters = Meters(copy=lambda device: (1e9, 2e9), launch=lambda device: next(calls))
    assert measure_rates(torch.device("cuda", 0), meters=meters).launch == 1e-5
    assert not list(calls)


def test_nothing_to_measure(tmp_path):
    from tpde.errors import UnsupportedDevice

    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InvalidInput, match="empty"):
        disk_rate([tmp_path / "empty"])
    with pytest.raises(UnsupportedDevice, match="name the rates"):
        measure_rates(torch.device("cpu"))


def test_a_disk_that_refuses_direct_reads_only_when_it_reads(tmp_path, monkeypatch):
    preadv = os.preadv

    def refuse(handle, *args):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(handle, *args)

    monkeypatch.setattr(os, "preadv", refuse)
    forgotten = []
    monkeypatch.setattr(os, "posix_fadvise", lambda handle, *range_: forgotten.append(range_))
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert disk_rate([tmp_path / "file"]) > 1e6
    # A block is tried, and dropped; then all, before it is timed: else the page cache would be.
    assert forgotten[:2] == [(0, 4096, os.POSIX_FADV_DONTNEED), (0, 0, os.POSIX_FADV_DONTNEED)]


def test_a_system_without_direct_reads(tmp_path, monkeypatch):
    for name in ("O_DIRECT", "posix_fadvise"):
        monkeypatch.delattr(os, name, raising=False)
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert disk_rate([tmp_path / "file"]) > 1e6


def test_a_disk_is_read_as_streaming_reads_it(tmp_path, monkeypatch):
    """By the same threads, in reads of the same size: until there is enough, and time is over."""
    from tpde.host.disk import READ_BYTES

    preadv, sizes = os.preadv, []

    def counted(handle, buffers, offset):
        got = preadv(handle, buffers, offset)
        if threading.current_thread().name == "tpde-disk":
            sizes.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(10 * READ_BYTES + 5))
    files = [tmp_path / "a", tmp_path / "b"]
    disk_rate(files, DiskSample(piece=3 * READ_BYTES))
    assert sum(sizes) == sum(it.stat().st_size for it in files)
    assert max(sizes) == READ_BYTES
    sizes.clear()
    disk_rate(files, DiskSample(least=3 * READ_BYTES, seconds=0.0, buffers=1, piece=3 * READ_BYTES))
    assert sum(sizes) == 3 * READ_BYTES


def test_a_disk_that_fails_while_it_is_measured(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "file").write_bytes(bytes(100_000))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ReadError, match="the disk failed"):
        disk_rate([tmp_path / "file"])
