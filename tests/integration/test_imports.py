"""What `import tpde` gives, what it does not import, and what it says where a package is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.models import torch

import tpde
import tpde.torch

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("tpde.pack_module", "`tpde.pack_module` needs torch"),
        ("tpde.unpack_module", "`tpde.unpack_module` needs torch"),
        ("tpde.apply_delta", "`tpde.apply_delta` needs torch"),
        ("tpde.make_delta", "`tpde.make_delta` needs torch"),
        ("tpde.from_pretrained", "running models needs torch"),
        ("import tpde.nn", "`tpde.nn` needs torch"),
        ("tpde.nn", "`tpde.nn` needs torch"),
        ("import tpde.integrations.diffusers", "`tpde.integrations.diffusers` needs torch"),
        ("tpde.safe_open(sys.argv[1]).get_tensor('a')", "a PyTorch tensor needs torch"),
        ("tpde.safe_open(sys.argv[1], device='cuda')", "a device for tensors needs torch"),
        ("tpde.CheckpointStore(sys.argv[1] + '-steps').load()", "a PyTorch tensor needs torch"),
    ],
)
def test_what_needs_torch_says_how_to_install_it(code: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tpde.torch.save_file({"a": torch.ones(3)}, path)
    with tpde.CheckpointStore(f"{path}-steps") as store:
        store.save(1, {"a": torch.ones(3)})
    script = f"""
import sys
sys.modules["torch"] = None  # importing it fails
import tpde, tpde.errors
try:
    {code}
except tpde.errors.MissingDependency as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert said in run.stdout
    assert 'pip install "tpde[' in run.stdout
    assert ('framework="np"' in run.stdout) == ("get_tensor" in code)  # which other calls have not


def test_importing_tpde_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, tpde; dir(tpde); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_are_there_by_their_names_once_they_are_used() -> None:
    code = """
import sys, tpde
assert not {"numpy", "torch"} & set(sys.modules)
assert tpde.numpy.save_file and "torch" not in sys.modules
assert tpde.torch.save and tpde.nn.add_deltas and tpde.errors.NativeError
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_there_and_no_others() -> None:
    assert dir(tpde) == sorted(tpde.__all__)
    for name in tpde.__all__:
        assert getattr(tpde, name).__doc__
    with pytest.raises(AttributeError, match="module `tpde` has no attribute `unpakc`"):
        tpde.unpakc  # noqa: B018
