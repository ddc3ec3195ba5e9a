"""`tpde plan` on tiny models, without a GPU."""

import dataclasses
import errno
import fcntl
import json
import os
import threading
from collections import Counter

import pytest
from support.backends import MadeBackend
from support.checkpoints import checkpoint, write
from support.commands import invoke, process
from support.models import make, torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.cli.plan import ranges, render  # noqa: E402
from tpde.errors import InvalidInput, OutOfMemory, ReadError  # noqa: E402
from tpde.integrations.transformers.activations import activations_of  # noqa: E402
from tpde.integrations.transformers.budget_plan import plan_streaming  # noqa: E402
from tpde.integrations.transformers.device_maps import devices_of  # noqa: E402
from tpde.integrations.transformers.model_footprint import cache_bytes  # noqa: E402
from tpde.integrations.transformers.shape import opened_shape  # noqa: E402
from tpde.integrations.transformers.streamed import ModelStreaming  # noqa: E402
from tpde.loading.footprint import FIXED_BYTES, TYPICAL  # noqa: E402
from tpde.loading.model_units import unit_of, units_of  # noqa: E402
from tpde.nn.replace import block_path  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.layout import MIB  # noqa: E402
from tpde.planning.planner import make_plan  # noqa: E402
from tpde.planning.units import Footprint, Placement, Unit  # noqa: E402
from tpde.streaming.rates import (  # noqa: E402
    CALL_SECONDS,
    DiskSample,
    Meters,
    disk_rate,
    given_rates,
    launch_seconds,
    measure_rates,
)

RATES = ("--copy-rate", "55", "--memory-rate", "4200")


@pytest.fixture(scope="module", params=["llama", "qwen2", "gpt2", "mixtral", "t5"])
def packed(request, tmp_path_factory):
    """Give a packed model's directory."""
    return checkpoint(tmp_path_factory.mktemp(request.param), request.param).packed


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Give a packed Llama's directory."""
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama").packed


def test_text(llama):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    made = process("plan", llama, "--vram", "256MiB", "--max-tokens", "100", *RATES, env=env)
    assert made.returncode == 0, made.stderr
    assert "plain:  model.layers 0-2, lm_head" in made.stdout
    assert "tokens/s, for up to 100 tokens; limited by" in made.stdout
    assert made.stderr == ""


def test_json(llama):
    made = invoke("plan", llama, "--vram", "512MiB", "--ram", "1GiB", "--json", *RATES, "--disk-rate", 6)
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert found["vram"] == 512 * MIB
    assert found["used_bytes"] == sum(found["device_bytes"].values()) <= found["vram"]
    assert found["rates"]["disk"] == 6e9
    assert found["rates"]["launch_seconds"] == CALL_SECONDS
    slower = invoke("plan", llama, "--vram", "512MiB", "--json", *RATES, "--call-time", "500")
    assert json.loads(slower.stdout)["rates"]["launch_seconds"] == pytest.approx(500e-6)
    assert json.loads(slower.stdout)["seconds"]["host"] > 2 * found["seconds"]["host"]
    units = [name for place in found["placements"] for name in place["units"]]
    assert sorted(units) == ["lm_head", "model.embed_tokens", *(f"model.layers.{i}" for i in range(3))]


def test_the_disk_is_measured_where_host_memory_is_bounded(llama):
    def found(*options):
        made = invoke("plan", llama, "--vram", "512MiB", "--json", *RATES, *options)
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
    made = invoke("plan", llama, "--vram", "16MiB", "--max-tokens", "100", *RATES)
    assert made.exit_code == 2
    assert "the least that works is" in made.stderr
    least = made.stderr.split("hint: use `")[1].split("`")[0]
    assert invoke("plan", llama, "--vram", least, "--max-tokens", "100", *RATES).exit_code == 0


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
    made = invoke("plan", llama, *args)
    assert made.exit_code == 2
    assert says in made.stderr
    assert "hint: " in made.stderr


def test_no_more_than_headers_is_read(llama, tmp_path):
    """Chunks may be damaged: nobody looks."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in llama.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-64:] = bytes(64)
        (folder / file.name).write_bytes(data)
    sane, damaged = (invoke("plan", it, "--vram", "1GiB", *RATES) for it in (llama, folder))
    assert sane.exit_code == 0
    assert damaged.stdout == sane.stdout


def test_units_are_groups_of_the_loaded_model(packed):
    """Every packed weight is in one unit, named as the group that decodes it."""
    import tpde
    from tpde.nn import packed_modules

    model = tpde.from_pretrained(packed)
    groups, experts = {}, Counter()
    for path, module in packed_modules(model):
        for slot in module.tpde_slots.values():
            name = path if slot.group is None else slot.group.name
            groups.setdefault(name, {}).update({id(source): source for source in slot.packed.sources})
            experts[name] += slot.shape[0] if len(slot.shape) == 3 else 0
    with opened_shape(packed) as (shape, checkpoint, plan):
        units = {unit.name: unit for unit in units_of(shape, plan.runs)}
        assert {unit_of(shape, name) for name in plan.runs} == set(units)
        total = sum(it.extent.size for it in checkpoint.packed.values())
    whole = {name: blobs for name, blobs in groups.items() if name in units}
    for name, blobs in whole.items():
        assert units[name].packed == sum(it.packed_bytes for it in blobs.values())
        assert units[name].plain >= sum(it.nbytes for it in blobs.values())
        maps = sum(-(-12 * it.header.chunks // 512) * 512 for it in blobs.values())
        # Tables and descriptors of each blob, and more of these where experts are copied one by one.
        assert units[name].index == maps + 18 * 1024 * len(blobs) + 512 * experts[name]
    # What is not a unit of its own is an embedding tied to one.
    kept = {key for blobs in whole.values() for key in blobs}
    assert all(set(blobs) <= kept for blobs in groups.values())
    assert sum(unit.packed for unit in units.values()) <= total
    assert all(it.rows == it.name.endswith(("embed_tokens", "wpe")) for it in units.values())


def test_only_some_of_the_parameters(packed):
    with opened_shape(packed) as (shape, checkpoint, plan):
        every = units_of(shape, plan.runs)
        one = [name for name in plan.runs if unit_of(shape, name) == every[1].name]
        made = plan_streaming(shape, checkpoint, plan, Budget(1 << 30, None, 64), only=one)
        assert list(made.placements) == [every[1].name]


def _divided(shape):
    """A device map that puts the second half of a model's parameters, by blocks, on another device."""
    blocks = list(dict.fromkeys(block_path(shape, name) or name for name, _ in shape.named_parameters()))
    first = set(blocks[: len(blocks) // 2])
    return {block: torch.device("cpu", int(block not in first)) for block in blocks}


def test_a_device_counts_what_is_there(packed):
    with opened_shape(packed) as (shape, checkpoint, plan):
        streaming = ModelStreaming(Budget(1 << 30, None, 64))
        streaming.plan(shape, checkpoint, plan, devices_of(shape, _divided(shape)))
        one, other = (made.parts for made in streaming.plans.values())
        whole = plan_streaming(shape, checkpoint, plan, Budget(1 << 30, None, 64)).parts
        # Of these no map says where they are.
        buffers = {id(it): -(-it.nbytes // 512) * 512 for _, it in shape.named_buffers()}
    assert one["plain"] + other["plain"] == whole["plain"] + sum(buffers.values())
    assert min(one["plain"], other["plain"]) > sum(buffers.values())
    assert one["activations"] == other["activations"] == whole["activations"]
    assert one["packed"] + other["packed"] + one["decoded"] + other["decoded"] <= (
        whole["packed"] + whole["decoded"]
    )
    twice = one["cache"] + other["cache"] - whole["cache"]  # of one layer
    assert 0 <= twice < whole["cache"] / 2
    assert max(one["cache"], other["cache"]) <= whole["cache"]
    # The other's weights may be in host memory, which is mapped for both: 2 MiB of page tables are the least.
    assert one["pages"] == other["pages"] == 2 << 20
    assert not whole["pages"]


def test_a_cache_is_where_its_blocks_are():
    model = make("llama")  # 3 layers
    names = [name for name, _ in model.named_parameters()]
    layer = 2 * 2 * 16 * 2 * 1000  # keys and values of 2 heads of 16
    for blocks, expected in (
        ((), 0),
        ((0,), 2.25 * layer),
        ((0, 2), 3.5 * layer),
        ((0, 1, 2), cache_bytes(model, 1000, 2)),
    ):
        only = [it for it in names if any(f"layers.{i}." in it for i in blocks)]
        assert cache_bytes(model, 1000, 2, [*only, "lm_head.weight"]) == expected
    encoders = make("t5")
    names = [name for name, _ in encoders.named_parameters()]
    whole = cache_bytes(encoders, 100, 2)
    assert cache_bytes(encoders, 100, 2, [it for it in names if it.startswith("encoder.")]) == 0
    assert cache_bytes(encoders, 100, 2, [it for it in names if it.startswith("decoder.")]) == whole


def test_where_a_map_puts_parameters_and_buffers(llama):
    with opened_shape(llama) as (shape, _, _):
        found = devices_of(shape, {"model": 0, "lm_head": 1, "model.layers.2": 1})
        assert found["model.layers.2.mlp.up_proj.weight"] == found["lm_head.weight"] == torch.device("cuda:1")
        assert found["model.norm.weight"] == found["model.rotary_emb.inv_freq"] == torch.device("cuda:0")
        some = devices_of(shape, {"model.embed_tokens": 0, "model.layers": 1})
        assert not {"model.rotary_emb.inv_freq", "lm_head.weight"} & set(some)
        with pytest.raises(InvalidInput, match="on cpu beside 0"):
            devices_of(shape, {"model": 0, "lm_head": "cpu"})


def test_max_tokens_count(llama):
    with opened_shape(llama) as (shape, checkpoint, plan):
        used = [
            plan_streaming(shape, checkpoint, plan, Budget(1 << 40, None, tokens)).used
            for tokens in (1, 100, 10_000)
        ]
        assert used[0] < used[1] < used[2]
        with pytest.raises(OutOfMemory, match=r"a smaller `max_tokens`$"):
            plan_streaming(shape, checkpoint, plan, Budget(1 << 28, None, 1 << 20))


def test_max_batch_counts(tmp_path):
    """Copies of experts, which a refusal names the number of."""
    packed = checkpoint(tmp_path, "mixtral").packed
    with opened_shape(packed) as (shape, files, plan):
        one, eight = (
            plan_streaming(shape, files, plan, Budget(1 << 40, None, 100, max_batch=batch)).parts
            for batch in (1, 8)
        )
        experts = activations_of(shape, 2)
        assert eight["activations"] - one["activations"] == 7 * experts.experts
        with pytest.raises(OutOfMemory, match=r"a smaller `max_tokens` or `max_batch`$"):
            plan_streaming(shape, files, plan, Budget(1 << 20, None, 100))


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


def test_rates_of_a_disk_and_a_host(llama, tmp_path):
    assert disk_rate(sorted(llama.glob("*.safetensors"))) > 1e6
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
