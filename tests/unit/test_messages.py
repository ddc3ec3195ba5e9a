"""What commands print is for people or programs: no name steers a terminal, and JSON is JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import invoke
from support.contents import fill
from support.files import pack_bytes, safetensors_bytes

from tpde.cli import common
from tpde.format.container import TensorSpec

EVIL = "a\x1b[2J\nb: intact\x07"
SPEC = TensorSpec("BF16", (4096,))


def test_what_verify_prints_steers_no_terminal(tmp_path: Path) -> None:
    packed = bytearray(pack_bytes(safetensors_bytes({EVIL: (SPEC, fill("normal", SPEC))})))
    packed[-700] ^= 0x10
    (tmp_path / "x.safetensors").write_bytes(bytes(packed))
    result = invoke("verify", tmp_path / "x.safetensors")
    assert result.exit_code == common.DAMAGE
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("b:")] == []
    assert lines[-1] == "1 problem found"


def test_numbers_that_json_does_not_have_are_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_json({"a": 1.5})
    assert capsys.readouterr().out == '{\n  "a": 1.5\n}\n'
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            common.print_json({"a": value})


def test_tables_are_no_wider_than_their_bound() -> None:
    text = common.table(("name", "n"), [("x" * 10_000, "1"), (EVIL, "2")])
    assert max(map(len, text.splitlines())) <= common.MAX_CELL + 3
    assert len(text.splitlines()) == 3
