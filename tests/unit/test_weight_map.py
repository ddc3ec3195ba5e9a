"""Which of a model's parameters stay packed, by their names, dtypes and ties, and why not all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from tpde.errors import InvalidInput  # noqa: E402
from tpde.integrations.transformers import weight_map as plans  # noqa: E402
from tpde.integrations.transformers.weight_map import WeightSource  # noqa: E402

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
