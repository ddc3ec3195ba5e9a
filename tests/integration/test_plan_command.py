"""`tpde plan` on tiny models, without a GPU."""

import dataclasses
import json
import os

import pytest
from support.checkpoints import write
from support.commands import invoke, process
from support.models import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.cli.plan import ranges, render  # noqa: E402
from tpde.errors import OutOfMemory  # noqa: E402
from tpde.integrations.transformers.shape import opened_shape  # noqa: E402
from tpde.integrations.transformers.streamed import ModelStreaming  # noqa: E402
from tpde.loading.footprint import FIXED_BYTES, TYPICAL  # noqa: E402
from tpde.loading.model_units import units_of  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.layout import MIB  # noqa: E402
from tpde.planning.planner import make_plan  # noqa: E402
from tpde.planning.units import Footprint, Placement, Unit  # noqa: E402
from tpde.streaming.rates import CALL_SECONDS, given_rates  # noqa: E402

RATES = ("--copy-rate", "55", "--memory-rate", "4200")


def test_text(llama):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    made = process("plan", llama.packed, "--vram", "256MiB", "--max-tokens", "100", *RATES, env=env)
    assert made.returncode == 0, made.stderr
    assert "plain:  model.layers 0-2, lm_head" in made.stdout
    assert "tokens/s, for up to 100 tokens; limited by" in made.stdout
    assert made.stderr == ""


def test_json(llama):
    made = invoke(
        "plan", llama.packed, "--vram", "512MiB", "--ram", "1GiB", "--json", *RATES, "--disk-rate", 6
    )
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert found["vram"] == 512 * MIB
    assert found["used_bytes"] == sum(found["device_bytes"].values()) <= found["vram"]
    assert found["rates"]["disk"] == 6e9
    assert found["rates"]["launch_seconds"] == CALL_SECONDS
    slower = invoke("plan", llama.packed, "--vram", "512MiB", "--json", *RATES, "--call-time", "500")
    assert json.loads(slower.stdout)["rates"]["launch_seconds"] == pytest.approx(500e-6)
    assert json.loads(slower.stdout)["seconds"]["host"] > 2 * found["seconds"]["host"]
    units = [name for place in found["placements"] for name in place["units"]]
    assert sorted(units) == ["lm_head", "model.embed_tokens", *(f"model.layers.{i}" for i in range(3))]


def test_the_disk_is_measured_where_host_memory_is_bounded(llama):
    def found(*options):
        made = invoke("plan", llama.packed, "--vram", "512MiB", "--json", *RATES, *options)
        return json.loads(made.stdout)["rates"].get("disk")

    assert found("--ram", "1GiB") not in (None, found("--ram", "1GiB")), "measured each time"
    assert found("--ram", "1GiB", "--disk-rate", 6) == 6e9
    assert found() is None


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Give a packed Llama's directory, in blocks of 23 MiB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2560, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=4096, num_hidden_layers=6, num_key_value_heads=8, **sizes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    torch.manual_seed(0)
    numbers = (torch.randn(1 << 23) * 0.02).to(torch.bfloat16)
    state = {name: numbers[: it.numel()].view(it.shape).clone() for name, it in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return write(tmp_path_factory.mktemp("large"), model).packed


@pytest.mark.parametrize("rates", [RATES, ("--copy-rate", "0.1", "--memory-rate", "0.5")])
def test_what_is_printed_is_what_loading_does(large, rates):
    """Whatever the machine; with units so large that it matters."""
    would, found, loaded = [], [], []
    slow = given_rates(1e8, 5e8)
    with opened_shape(large) as (shape, checkpoint, plan):
        for mib in range(280, 392, 4):
            args = ("plan", large, "--vram", f"{mib}MiB", "--max-tokens", "64", "--json", *rates)
            done = invoke(*args)
            assert done.exit_code == 0, done.output
            places = json.loads(done.stdout)["placements"]
            found.append({name: it["placement"] for it in places for name in it["units"]})
            streaming = ModelStreaming(Budget(mib * MIB, None, 64))
            streaming.plan(shape, checkpoint, plan, dict.fromkeys(plan.runs, torch.device("cpu")))
            (made,) = streaming.plans.values()
            loaded.append({name: it.value for name, it in made.placements.items()})
            footprint = Footprint(
                made.parts["plain"], made.parts["cache"], made.parts["activations"], FIXED_BYTES
            )
            other = make_plan(units_of(shape, plan.runs), footprint, mib * MIB, None, slow, calls=50)
            would.append({name: it.value for name, it in other.placements.items()})
    assert found == loaded
    assert found != would, "rates must matter here"


def test_too_small_a_budget_names_the_least(llama):
    made = invoke("plan", llama.packed, "--vram", "16MiB", "--max-tokens", "100", *RATES)
    assert made.exit_code == 2
    assert "the least that works is" in made.stderr
    least = made.stderr.split("hint: use `")[1].split("`")[0]
    assert invoke("plan", llama.packed, "--vram", least, "--max-tokens", "100", *RATES).exit_code == 0


def test_a_budget_just_below_the_least_is_not_written_as_the_least():
    units = [Unit("layers.0", 1 << 20, 3 << 19, 1 << 12)]
    footprint = Footprint(plain=1 << 20, cache=0, activations=0, fixed=FIXED_BYTES)
    with pytest.raises(OutOfMemory) as found:
        make_plan(units, footprint, 1 << 20, None, TYPICAL, calls=10)
    least = found.value.least
    assert least is not None
    with pytest.raises(OutOfMemory, match=f"`vram` is {(least - 1) // MIB} MiB"):
        make_plan(units, footprint, least - 1, None, TYPICAL, calls=10)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--vram", "16GiB"), "`--copy-rate`"),
        (("--vram", "16G", *RATES), "`16GiB` or `16GB`"),
        (("--vram", "16GiB", "--device", "cpu"), "not on `cpu`"),
        (("--vram", "16GiB", "--device", "cuda:0"), "`tpde doctor`"),
        (("--vram", "16GiB", "--device", "cuda:0"), "name `--copy-rate` ("),
        (("--vram", "16GiB", "--device", "cuda:0", *RATES), "leave it out"),
    ],
)
def test_what_cannot_work(llama, args, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = invoke("plan", llama.packed, *args)
    assert made.exit_code == 2
    assert says in made.stderr
    assert "hint: " in made.stderr


def test_no_more_than_headers_is_read(llama, tmp_path):
    """Chunks may be damaged: nobody looks."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in llama.packed.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-64:] = bytes(64)
        (folder / file.name).write_bytes(data)
    sane, damaged = (invoke("plan", it, "--vram", "1GiB", *RATES) for it in (llama.packed, folder))
    assert sane.exit_code == 0
    assert damaged.stdout == sane.stdout


def test_layout_of_a_streamed_plan():
    units = [
        Unit("embed", 100 * MIB, 150 * MIB, MIB, rows=True),
        *(Unit(f"layers.{i}", 100 * MIB, 150 * MIB, MIB) for i in range(6)),
    ]
    made = make_plan(
        units,
        Footprint(MIB, MIB, MIB, 128 * MIB),
        560 * MIB,
        450 * MIB,
        given_rates(55e9, 4e12, 6e9),
        calls=9,
    )
    assert {*made.placements.values()} >= {Placement.HOST, Placement.DISK}
    text = render(made, units, 77)
    assert "disk:   layers" in text
    assert "limited by reading from the disk" in text
    assert "to read files to, of 450.0 MiB" in text
    tiled = dataclasses.replace(made, tiled=("layers.1", "layers.2"))
    assert "row by row, since they do not fit whole: layers 1-2" in render(tiled, units, 77)


def test_ranges():
    assert ranges(["a.0", "a.1", "a.2", "a.5", "b", "c.d.7"]) == "a 0-2, 5, b, c.d 7"
    assert ranges([]) == ""
