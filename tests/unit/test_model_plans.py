"""What becomes of a checkpoint's tensors in a model of transformers: what stays packed, and why not all."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from support.contents import fill  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402

from tpde.errors import InvalidInput  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.integrations.transformers import weight_map as plans  # noqa: E402
from tpde.integrations.transformers.folder import stored_dtype, weight_files  # noqa: E402
from tpde.integrations.transformers.placeholders import Placeholders  # noqa: E402
from tpde.integrations.transformers.unpacked import LOUD_BYTES, load_plain, report_decoded, some  # noqa: E402
from tpde.integrations.transformers.weight_map import WeightMap, WeightSource  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402

BF16 = torch.bfloat16


def run(*shape: int, dtype: Any = BF16, whole: bool = True, parts: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(shape=torch.Size(shape), dtype=dtype, whole=whole, parts=parts)


# ---- why a parameter does not stay packed ----


@pytest.fixture
def model() -> Any:
    made = torch.nn.Module()
    made.linear = torch.nn.Linear(4, 3)
    made.norm = torch.nn.BatchNorm1d(3)
    made.all_tied_weights_keys = {}
    return made


@pytest.mark.parametrize(
    ("name", "made", "said"),
    [
        ("linear.weight", run(3, 4), None),
        ("linear.nothing", run(3, 4), "belongs to a Linear, which cannot hold"),
        ("nowhere.weight", run(3, 4), "has no place in the model"),
        (
            "linear.weight",
            run(3, 4, dtype=torch.float16),
            "is stored as torch.float16 and loaded as torch.bf",
        ),
        ("linear.weight", run(3, 4, whole=False), "is cut by transformers"),
        ("linear.bias", run(3), "belongs to a Linear, which cannot hold"),
        ("norm.weight", run(3), "belongs to a BatchNorm1d, which cannot hold"),
        ("norm.running_mean", run(3), "belongs to a BatchNorm1d, which cannot hold"),
    ],
)
def test_why_a_parameter_does_not_stay_packed(name: str, made: Any, said: str | None, model: Any) -> None:
    found = plans._refusal(model, name, made, BF16)
    assert found is None if said is None else said.replace("bf", "bfloat16") in str(found)


@pytest.mark.parametrize("name", ["linear.weight", "linear.bias", "norm.running_mean"])
def test_another_shape_is_refused_before_anything_is_decoded(name: str, model: Any) -> None:
    with pytest.raises(InvalidInput, match="ignore_mismatched_sizes=True") as caught:
        plans._refusal(model, name, run(4, 3, dtype=torch.int8, whole=False), BF16)
    assert caught.value.found == (4, 3)
    assert caught.value.needed == tuple(model.state_dict()[name].shape)


def test_dtypes_that_a_model_keeps() -> None:
    state = {"a.weight": torch.zeros(1, dtype=torch.float16), "a.norm.weight": torch.zeros(1, dtype=BF16)}
    model = SimpleNamespace(
        _get_dtype_plan=lambda dtype: {"norm.*": torch.float32, "*.b": torch.float64},
        state_dict=lambda: state,
    )
    expected = plans.expected_dtypes(model, BF16)
    assert expected("a.weight") is torch.float16
    assert expected("a.norm.weight") is torch.float32
    assert expected("c.b") is torch.float64
    assert expected("nowhere") is BF16


# ---- ties ----


class Part(SimpleNamespace):
    name = "x"


def part(spec: Any = 1, digest: Any = b"d") -> Any:
    return Part(spec=spec, digest=digest)


def test_the_same_bytes() -> None:
    one = run(1, parts=(part(), part(2, b"e")))
    assert plans.same_bytes(one, run(1, parts=(part(), part(2, b"e"))))
    for other in (
        (part(),),
        (part(), part(2, b"e"), part()),
        (part(), part(3, b"e")),
        (part(), part(2, b"f")),
        (part(0), part(2, b"e")),
    ):
        assert not plans.same_bytes(one, run(1, parts=other))


class Tied(torch.nn.Module):
    """A head tied to an embedding, and a vector that is tied to it, too."""

    def __init__(self, ties: dict[str, str]) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4)
        self.norm = torch.nn.LayerNorm(3)
        self.all_tied_weights_keys = ties


EMBED, HEAD, NORM = "embed.weight", "head.weight", "norm.weight"


@pytest.mark.parametrize(
    ("ties", "packed", "there", "said"),
    [
        ({HEAD: EMBED}, [EMBED], [EMBED], None),  # as most models are
        ({HEAD: EMBED}, [EMBED, HEAD], [EMBED, HEAD], None),
        ({HEAD: EMBED}, [], [EMBED], None),
        ({HEAD: EMBED}, [EMBED], [EMBED, HEAD], "is tied to `head.weight`, which is plain in the files"),
        ({HEAD: EMBED}, [HEAD], [EMBED, HEAD], "is tied to `embed.weight`, which is plain in the files"),
        ({HEAD: EMBED}, [HEAD], [HEAD], None),
        ({NORM: EMBED}, [EMBED], [EMBED], "is tied to `norm.weight`, which cannot hold packed weights"),
        ({EMBED: NORM}, [EMBED], [EMBED], "is tied to `norm.weight`, which cannot hold packed weights"),
        ({}, [EMBED], [EMBED, HEAD], None),
    ],
)
def test_what_is_tied_to_a_plain_weight_is_plain(
    ties: dict[str, str], packed: list[str], there: list[str], said: str | None
) -> None:
    """With all that comes of the same tensors."""
    sources = {name: WeightSource(name, None, {}) for name in packed}
    runs, decoded = dict.fromkeys([*packed, "other"], run(1)), list[Any]()
    origin = dict(sources) | {"other": WeightSource("other", None, {})}
    if packed:
        runs["more"], origin["more"] = run(1), sources[packed[0]]
    plans._loosen_ties(Tied(ties), runs, origin, decoded, there)
    if said is None:
        assert not decoded
        assert len(runs) == len(origin)
    else:
        assert decoded == [(sources[packed[0]], said)]
        assert list(runs) == ["other"]


# ---- files of a model ----

SPEC = TensorSpec("BF16", (64, 128))
PACKED, PLAIN = (SPEC, fill("normal", SPEC)), (TensorSpec("U8", (3,)), b"abc")


def write(path: Path, **tensors: Any) -> Path:
    path.write_bytes(pack_bytes(safetensors_bytes(tensors)))
    return path


def test_what_is_only_partly_packed(tmp_path: Path) -> None:
    with Checkpoint([write(tmp_path / "x", a=PACKED, b=PACKED, c=PLAIN)]) as checkpoint:
        sources = [
            WeightSource("one", None, {"p": ["a"], "q": ["b"]}),
            WeightSource("two", None, {"p": ["a"], "q": ["c"]}),
            WeightSource("three", None, {"p": ["b", "c"]}),
        ]
        assert [it.stored(checkpoint) for it in sources] == [["a", "b"], ["a"], ["b"]]
        assert WeightMap({}, [(it, "") for it in sources], [], []).halves(checkpoint) == ["two", "three"]


@pytest.mark.parametrize(("more", "level"), [(-1, logging.INFO), (0, logging.WARNING)])
def test_only_what_is_large_is_worth_a_warning(
    more: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    packed = {"a": SimpleNamespace(nbytes=LOUD_BYTES - 5), "b": SimpleNamespace(nbytes=5 + more)}
    checkpoint: Any = SimpleNamespace(packed=packed, is_packed=True)
    decoded = [(WeightSource(it, None, {"": [it, "plain"]}), "is odd") for it in packed]
    with caplog.at_level(logging.INFO, "tpde"):
        assert report_decoded(WeightMap({}, decoded, [], []), checkpoint) == 2
        assert report_decoded(WeightMap({}, [], [], []), checkpoint) == 0
    (record,) = caplog.records
    assert record.levelno == level
    said = f"2 of 2 packed tensors ({LOUD_BYTES + more} bytes) are decoded and stay plain in memory, because"
    assert record.getMessage() == f"{said} each is odd: `a`, `b`"


def test_a_few_names_are_told() -> None:
    assert some(["a", "b", "c", "d"]) == "`a`, `b`, `c`, `d`"
    assert some(["a", "b", "c", "d", "e", "f"]) == "`a`, `b`, `c`, `d` and 2 more"
    assert "\x1b" not in some(["\x1b[2J"])


def test_tensors_that_do_not_go_together(tmp_path: Path) -> None:
    """What transformers says of them is told; our own errors, and a GPU's, are left as they are."""

    def convert(*_: Any) -> Any:
        raise error

    with Checkpoint([write(tmp_path / "x", a=PACKED, c=PLAIN)]) as checkpoint:
        source = type("Odd", (WeightSource,), {"convert": convert})("w", None, {"p": ["a"], "q": ["c"]})
        args = torch.nn.Module(), source, checkpoint, torch.device("cpu"), BF16
        error: Exception = RuntimeError("sizes differ")
        with pytest.raises(InvalidInput, match=r"`a`, `c` cannot become `w` .*RuntimeError: sizes differ"):
            load_plain(*args)
        for error in (InvalidInput("ours"), torch.cuda.OutOfMemoryError("full")):
            with pytest.raises(type(error)) as caught:
                load_plain(*args)
            assert caught.value is error


def test_the_first_floating_point_tensor_tells_a_models_dtype(tmp_path: Path) -> None:
    half = TensorSpec("F16", (2,)), bytes(4)
    for tensors, found in (
        ({"b": PACKED, "c": half, "a": PLAIN}, BF16),
        ({"b": PACKED, "a": half}, torch.float16),
        ({"a": PLAIN}, torch.get_default_dtype()),
    ):
        write(tmp_path / "model.safetensors", **tensors)
        assert stored_dtype(tmp_path) is found
    names = {"z": "1.safetensors", "a": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    write(tmp_path / "1.safetensors", z=PACKED)
    assert stored_dtype(tmp_path) is BF16, "of the first file; the others are not there"


def test_an_index_that_transformers_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    path.write_text('{"weight_map": {"a": "1.safetensors"}}')
    with pytest.raises(InvalidInput, match="it has no `metadata`"):
        weight_files(tmp_path)
    path.write_text('{"metadata": {}, "weight_map": {"a": "1.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors"]


# ---- while transformers loads ----


class Loading(torch.nn.Module):
    """A model as transformers has it."""

    _keys_to_ignore_on_load_unexpected = {"known"}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.ties = 0

    def tie_weights(self, how: str = "") -> str:
        """Ties."""
        self.ties += 1
        return f"tied {how}"


@pytest.mark.parametrize("own", [False, True])
def test_hidden_weights_are_shown_when_they_are_tied(own: bool) -> None:
    model, done = Loading(), list[int]()
    if own:
        model._keys_to_ignore_on_load_unexpected = {"mine"}
    every = list(model.state_dict())
    places = Placeholders(model, ["a.weight"], ["a.weight"], lambda: done.append(len(model.state_dict())))
    assert getattr(model.a.weight, "_is_hf_initialized", False)
    assert not hasattr(model.b.weight, "_is_hf_initialized")
    assert list(model.state_dict()) == [it for it in every if it != "a.weight"]
    assert "x.a.weight" not in model.state_dict(prefix="x.")
    patterns = {"mine" if own else "known", "_tpde$", r"(^|\.)(a\.weight)$"}
    assert model._keys_to_ignore_on_load_unexpected == patterns
    assert not done
    assert model.tie_weights("now") == "tied now"
    assert (done, model.ties) == ([4], 1), "by then they are shown"
    assert model.tie_weights(how="again") == "tied again"
    assert done == [4]
    assert list(model.state_dict()) == every
    assert model._keys_to_ignore_on_load_unexpected == patterns, "until the report of what was not expected"
    places.close()
    assert done == [4]
    assert model._keys_to_ignore_on_load_unexpected == ({"mine"} if own else {"known"})
    assert ("_keys_to_ignore_on_load_unexpected" in vars(model)) == own
    assert "tie_weights" not in vars(model)


def test_weights_that_nobody_has_tied_are_shown_in_the_end() -> None:
    model, done = Loading(), list[int]()
    places = Placeholders(model, ["b.weight"], [], lambda: done.append(1))
    places.close()
    assert done == [1]
    assert "b.weight" in model.state_dict()
    assert model.ties == 0


# ---- names ----


class Named(torch.nn.Module):
    """A model that knows some names of old."""

    base_model_prefix = "base"
    _keys_to_ignore_on_load_unexpected = {r"^old\."}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)


def sorted_names(packed: list[str], plain: list[str] = [], conversions: Any = ()) -> tuple[Any, Any]:  # noqa: B006
    checkpoint: Any = SimpleNamespace(packed=dict.fromkeys(packed), plain=dict.fromkeys(plain))
    return plans._sources(Named(), checkpoint, conversions)


def test_what_has_no_place_is_told_but_for_what_is_known() -> None:
    known = ["old.x", "rotary_emb.inv_freq", "x.rotary_emb.inv_freq", "position_ids", "x.position_ids"]
    odd = ["strange", "not.old.x", "my_position_ids"]
    sources, unexpected = sorted_names(["a.weight", *known, *odd], ["b.weight", "plain"])
    assert sorted(unexpected) == sorted(odd), "what is plain transformers tells itself"
    assert {name: it.names for name, it in sources.items()} == {
        "a.weight": {"a.weight": ["a.weight"]},
        "b.weight": {"b.weight": ["b.weight"]},
    }
    assert all(it.converter is None for it in sources.values())


def test_a_name_that_a_model_has_is_its_own_whatever_it_was_once_renamed_to() -> None:
    from tpde.integrations.transformers.internals import WeightRenaming

    sources, unexpected = sorted_names(["a.weight"], [], [WeightRenaming("a", "gone")])
    assert (list(sources), unexpected) == (["a.weight"], [])
    sources, unexpected = sorted_names(["c.weight"], [], [WeightRenaming("c", "a")])
    assert (list(sources), unexpected) == (["a.weight"], [])
    sources, unexpected = sorted_names(["base.a.weight"])
    assert (list(sources), unexpected) == (["a.weight"], []), "of a larger model"


def test_all_that_is_decoded_is_cast(tmp_path: Path) -> None:
    """Plain tensors, too, that become one weight with packed ones."""
    given: dict[str, Any] = {}

    def convert(self: Any, model: Any, take: Any) -> dict[str, Any]:
        given.update({name: take(name) for name in ("a", "b")})
        return {"weight": given["a"] + given["b"]}

    plain = (TensorSpec("BF16", (64, 128)), bytes(2 * 64 * 128))
    (tmp_path / "y").write_bytes(safetensors_bytes({"b": plain}))
    with Checkpoint([write(tmp_path / "x", a=PACKED), tmp_path / "y"]) as checkpoint:
        source = type("Sum", (WeightSource,), {"convert": convert})("weight", None, {"p": ["a"], "q": ["b"]})
        model = torch.nn.Linear(128, 64, bias=False)
        assert load_plain(model, source, checkpoint, torch.device("cpu"), torch.float64) == ["weight"]
    assert {name: it.dtype for name, it in given.items()} == dict.fromkeys("ab", torch.float64)
    words = torch.frombuffer(bytearray(PACKED[1]), dtype=BF16).reshape(64, 128)
    assert torch.equal(model.weight.detach(), words.double())
