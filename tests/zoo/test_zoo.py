"""A sample of the zoo; `python -m tests.zoo` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
pytest.importorskip("diffusers", reason="needs diffusers")

from zoo.architectures import ARCHITECTURES
from zoo.checks import CHECKS, applies
from zoo.flows import FLOWS
from zoo.report import pages
from zoo.runner import FLOW, Result, Task, do, run

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other libraries

SAMPLE = [
    "llama",
    "qwen2_tied",
    "gpt2",
    "gemma2",
    "mixtral",
    "mamba",
    "bert",
    "t5",
    "bart",
    "vit",
    "resnet",
    "llava",
    "pixart",
]
OTHER_DTYPES = [("llama", "fp32"), ("gpt2", "fp16"), ("bert", "fp32")]
SOME_FLOWS = [
    "peft_lora",
    "peft_lora_gpt2_conv1d",
    "load_state_dict",
    "plain_state_dict",
    "inference_mode",
    "half",
]


def _checked(task: Task) -> None:
    result = do(task)
    assert result.status in ("ok", "plain", "refused"), result.reason


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in SAMPLE for check in CHECKS if applies(check, ARCHITECTURES[name])],
)
def test_sample(name: str, check: str) -> None:
    _checked(Task(name, check, "bf16"))


@pytest.mark.parametrize(
    ("name", "dtype", "check"),
    [
        (name, dtype, check)
        for name, dtype in OTHER_DTYPES
        for check in ("forward", "generate")
        if applies(check, ARCHITECTURES[name])
    ],
)
def test_other_dtypes(name: str, dtype: str, check: str) -> None:
    _checked(Task(name, check, dtype))


@pytest.mark.parametrize("name", SOME_FLOWS)
def test_flows(name: str) -> None:
    _checked(Task(name, FLOW))


def test_breadth() -> None:
    libraries = [it.library for it in ARCHITECTURES.values()]
    assert libraries.count("transformers") >= 60
    assert libraries.count("diffusers") >= 6
    assert libraries.count("timm") >= 3


def test_a_process_that_dies_is_a_failure_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    def dies(pack: object) -> dict[str, object]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    monkeypatch.setitem(FLOWS, "dies", dies)
    monkeypatch.setitem(FLOWS, "lives", lambda pack: {})
    tasks = [Task("dies", FLOW), Task("lives", FLOW)]
    seen: list[Result] = []
    found = run(tasks, 2, seen.append)
    assert [(it.status, it.reason) for it in found] == [("fail", "the process died of SIGKILL"), ("ok", "")]
    assert sorted(it.task.name for it in seen) == ["dies", "lives"]
    (text,) = pages(found, Path("zoo.md")).values()
    assert "| dies | **no** | the process died of SIGKILL |" in text
    assert "`lives`" in text


def test_what_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    calls: list[int] = []

    def drifts(pack: object) -> dict[str, torch.Tensor]:
        calls.append(0)
        return {"zero": torch.tensor([1.0, -0.0 if len(calls) > 2 else 0.0])}

    monkeypatch.setitem(FLOWS, "drifts", drifts)
    result = do(Task("drifts", FLOW))
    assert (result.status, result.reason) == (
        "fail",
        "zero: 1 of 2 words differ, the first at 1: -0.0, expected 0.0",
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_random_calls(dtype: str) -> None:
    """Of thousands: `python -m tests.zoo.calls`."""
    from zoo.calls import KINDS, call

    found = [call(kind, dtype, "cpu", seed) for seed in range(30) for kind in KINDS]
    assert "differs" not in found
    assert found.count("same") > 40
