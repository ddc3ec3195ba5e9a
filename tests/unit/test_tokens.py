"""What a call asks for of tokens and sequences, and what is refused. The models are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.errors import OutOfMemory  # noqa: E402
from tpde.integrations.transformers.activations import Activations  # noqa: E402
from tpde.integrations.transformers.recurrent import NONE  # noqa: E402
from tpde.integrations.transformers.tokens import (  # noqa: E402
    TokenLimit,
    check_experts,
    check_sequences,
    check_states,
    check_tokens,
    limit_tokens,
)

PLAIN = Activations(states=10, inside=0, pair=0, experts=0, logits=0, sampling=0)


class Config(SimpleNamespace):
    """Of a model and of its text part."""

    def get_text_config(self) -> Any:
        return self


class Made(torch.nn.Module):
    """A model, or an encoder, that computes nothing.

    Parameters
    ----------
    generates : bool
        Text.
    encoder : Made, optional
        That it has.
    """

    def __init__(self, *, generates: bool = True, encoder: Any = None, **config: Any) -> None:
        super().__init__()
        self.config = Config(is_encoder_decoder=encoder is not None, **config)
        self.encoder, self.generates, self.calls = encoder, generates, list[Any]()

    def can_generate(self) -> bool:
        return self.generates

    def get_encoder(self) -> Any:
        return self.encoder

    def forward(self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None) -> None:
        self.calls.append(input_ids)


class Hearing(Made):
    """One that makes a token of two frames."""

    def _get_feat_extract_output_lengths(self, frames: int) -> int:
        return frames // 2


def limit(model: Any, **options: Any) -> TokenLimit:
    given = {"max_tokens": 100, "max_batch": 2, "activations": PLAIN} | options
    return TokenLimit(model, given["max_tokens"], given["max_batch"], given["activations"])


def ids(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.long)


class Cache:
    """A cache that says how many tokens it holds."""

    def __init__(self, length: int | None = None, rooms: tuple[int | None, ...] = ()) -> None:
        self.length = length
        self.layers = [SimpleNamespace(max_cache_len=it) if it else SimpleNamespace() for it in rooms]

    def get_seq_length(self) -> int:
        if self.length is None:
            raise ValueError("no layer has keys")
        return self.length


KEYS = (torch.zeros(2, 4, 9, 16), torch.zeros(2, 4, 9, 16))


@pytest.mark.parametrize(
    ("took", "asks"),
    [
        ({}, (0, 0, 0)),
        ({"input_ids": ids(3, 7)}, (3, 7, 7)),
        ({"input_ids": ids(7)}, (1, 7, 7)),
        ({"inputs_embeds": torch.zeros(3, 7, 64)}, (3, 7, 7)),
        ({"input_ids": None, "inputs_embeds": torch.zeros(3, 7, 64)}, (3, 7, 7)),
        ({"input_ids": ids(2, 5), "inputs_embeds": torch.zeros(3, 4, 8)}, (3, 5, 5)),
        ({"input_ids": ids(2, 5), "labels": ids(4, 9)}, (2, 5, 5)),
        ({"input_ids": ids(2, 1), "past_key_values": None}, (2, 1, 1)),
        ({"input_ids": ids(2, 1), "past_key_values": Cache(9)}, (2, 1, 10)),
        ({"input_ids": ids(2, 1), "past_key_values": None, "cache_params": Cache(9)}, (2, 1, 10)),
        ({"input_ids": ids(2, 1), "past_key_value": Cache(9)}, (2, 1, 10)),
        ({"input_ids": ids(2, 1), "cache": Cache(9)}, (2, 1, 10)),  # of transformers 5.24
        ({"input_ids": ids(2, 3), "cache_params": Cache(None)}, (2, 3, 3)),
        ({"input_ids": ids(2, 3), "past_key_values": Cache(9, (None, None))}, (2, 3, 12)),
        ({"input_ids": ids(2, 3), "past_key_values": Cache(9, (None, 8, 12))}, (2, 3, 12)),
        ({"input_ids": ids(2, 20), "past_key_values": Cache(9, (8, 12))}, (2, 20, 20)),
        ({"input_ids": ids(2, 3), "past_key_values": (KEYS, KEYS)}, (2, 3, 12)),
        ({"input_ids": ids(2, 3), "past_key_values": ()}, (2, 3, 3)),
        ({"input_ids": ids(2, 3), "past_key_values": ((None, None),)}, (2, 3, 3)),
        ({"input_ids": ids(2, 3), "past_key_values": object()}, (2, 3, 3)),
        ({"input_ids": ids(2, 3), "past_key_values": {}}, (2, 3, 3)),
    ],
)
def test_what_a_call_asks_for(took: dict[str, Any], asks: tuple[int, int, int]) -> None:
    assert limit(Made()).count(took) == asks


BOTH = SimpleNamespace(self_attention_cache=Cache(9), cross_attention_cache=Cache(70))


@pytest.mark.parametrize(
    ("took", "asks"),
    [
        ({"input_ids": ids(3, 7), "decoder_input_ids": ids(3, 2)}, (3, 2, 9)),
        ({"input_ids": ids(2, 7), "decoder_input_ids": ids(5, 2)}, (5, 2, 9)),
        ({"input_ids": ids(5, 7), "decoder_input_ids": ids(2, 2)}, (5, 2, 9)),
        ({"input_ids": ids(2, 7), "decoder_inputs_embeds": torch.zeros(4, 3, 8)}, (4, 3, 10)),
        ({"input_ids": ids(2, 7), "labels": ids(6, 4)}, (6, 4, 11)),
        ({"input_ids": ids(2, 7), "decoder_input_ids": ids(2, 3), "labels": ids(6, 9)}, (2, 3, 10)),
        ({"encoder_outputs": (torch.zeros(2, 7, 8),), "decoder_input_ids": ids(2, 1)}, (2, 1, 8)),
        ({"encoder_outputs": (torch.zeros(4, 7, 8),), "decoder_input_ids": ids(2, 1)}, (4, 1, 8)),
        ({"encoder_outputs": (torch.zeros(2, 7, 8),), "decoder_input_ids": ids(4, 1)}, (4, 1, 8)),
        ({"encoder_outputs": (torch.zeros(2, 9, 8),), "input_ids": ids(2, 7)}, (2, 0, 7)),
        (
            {
                "encoder_outputs": (torch.zeros(2, 7, 8),),
                "decoder_input_ids": ids(2, 1),
                "past_key_values": BOTH,
            },
            (2, 1, 17),
        ),
        ({"input_features": torch.zeros(3, 16, 40), "decoder_input_ids": ids(3, 4)}, (3, 4, 24)),
        ({"input_values": torch.zeros(3, 60), "decoder_input_ids": ids(2, 4)}, (3, 4, 34)),
        ({"input_features": None, "input_values": torch.zeros(3, 60)}, (3, 0, 30)),
        ({"input_features": torch.zeros(3, 16, 40), "input_ids": ids(2, 5)}, (2, 0, 5)),
    ],
)
def test_what_a_call_of_an_encoder_and_a_decoder_asks_for(
    took: dict[str, Any], asks: tuple[int, int, int]
) -> None:
    assert limit(Hearing(encoder=Made())).count(took) == asks


def test_sounds_of_a_model_that_does_not_say_what_is_left_of_them() -> None:
    took = {"input_features": torch.zeros(3, 16, 40), "decoder_input_ids": ids(2, 4)}
    assert limit(Made(encoder=Made())).count(took) == (2, 4, 4)


def refused(call: Any, *args: Any, **kwargs: Any) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught:
        call(*args, **kwargs)
    return caught.value


def test_as_many_tokens_as_there_is_room_for() -> None:
    check_tokens(4, 25, 100)
    error = refused(check_tokens, 1, 101, 100)
    assert (error.found, error.needed) == (100, 101)


def test_as_many_sequences_as_can_be_sampled_from() -> None:
    """100 tokens of 10 bytes beside 2 sequences of 40: what 27 take of 40 each."""
    made = PLAIN._replace(sampling=30, logits=10)
    room = 100 * 10 + 100 * 10 + 2 * 30
    assert made.tokens(100, 2) == room
    check_sequences(51, 100, 2, made)
    error = refused(check_sequences, 52, 100, 2, made)
    assert (error.found, error.needed) == (room, 52 * 40)
    assert "at most 51 at once" in str(error)
    exact = made._replace(sampling=20, logits=0)  # 100 * 10 + 2 * 20 = 52 * 20
    check_sequences(52, 100, 2, exact)
    refused(check_sequences, 53, 100, 2, exact)


def test_as_many_states_as_there_is_room_for() -> None:
    made = PLAIN._replace(recurrent=NONE._replace(states=1000))
    check_states(2, 2, made)
    error = refused(check_states, 3, 2, made)
    assert (error.found, error.needed) == (2000, 3000)
    check_states(3, 2, PLAIN)


def test_as_many_copies_of_experts_as_there_is_room_for() -> None:
    made = PLAIN._replace(experts=1000, copies=True)
    check_experts(2, 2, 100, 4, made)
    for batch, new, fewer in (
        (5, 1, "at most 4 x 1 at once"),
        (1, 5, "fewer at once"),
        (2, 4, "at most 1 x 4"),
    ):
        error = refused(check_experts, batch, new, 100, 4, made)
        assert (error.found, error.needed) == (4000, batch * new * 1000)
        assert f"pass {fewer}" in str(error)
        assert "experts_implementation=" not in str(error)
    assert '`experts_implementation="batched_mm"` and `max_batch=1`' in str(
        refused(check_experts, 1, 1, 100, 4, made._replace(copies=False))
    )
    check_experts(5, 1, 100, 4, PLAIN)


@pytest.mark.parametrize(
    ("options", "config", "activations", "said"),
    [
        ({}, {}, {"states": 10}, None),
        ({}, {}, {"sampling": 500, "logits": 1}, "choosing the next tokens of 9"),
        ({"generates": False}, {}, {"sampling": 500, "logits": 1}, None),
        ({}, {}, {"sampling": 500}, None),  # without a vocabulary nothing is chosen
        ({}, {}, {"recurrent": NONE._replace(states=7)}, "states of 9 sequences"),
        ({}, {"_experts_implementation": "batched_mm"}, {"experts": 5, "copies": True}, "experts of 9 x 1"),
        ({}, {"_experts_implementation": "batched_mm"}, {}, None),
        ({}, {"_experts_implementation": "grouped_mm"}, {"experts": 5, "copies": True}, None),
        ({}, {}, {"experts": 5, "copies": True}, None),
    ],
)
def test_what_is_refused_before_a_call(
    options: dict[str, Any], config: dict[str, Any], activations: dict[str, Any], said: str | None
) -> None:
    """Nine sequences of a token, where there is room for a hundred of them, and two sequences."""
    model = Made(**options, **config)
    limit_tokens(model, 100, 2, PLAIN._replace(**({"states": 1} | activations)))
    if said is None:
        model(input_ids=ids(9, 1))
    else:
        assert said in str(refused(model, input_ids=ids(9, 1)))
    assert len(model.calls) == (said is None)


def test_an_implementation_of_experts_that_is_chosen_later_counts() -> None:
    """`generate` changes it from one call to the next."""
    model = Made(_experts_implementation="grouped_mm")
    limit_tokens(model, 100, 2, PLAIN._replace(experts=5, copies=True))
    model(ids(9, 1))
    model.config._experts_implementation = "batched_mm"
    refused(model, ids(9, 1))


def test_a_refused_call_reaches_nobody() -> None:
    """Other hooks, which may have brought weights by then, were there first."""
    model, others = Made(), list[Any]()
    model.register_forward_pre_hook(lambda *_: others.append(1))
    limit_tokens(model, 20, 8, PLAIN)
    for args, kwargs in (
        ((ids(3, 7),), {}),
        ((), {"input_ids": ids(3, 7)}),
        ((None, None, torch.zeros(3, 7, 4)), {}),
        ((ids(1, 1),), {"inputs_embeds": torch.zeros(3, 7, 4)}),
    ):
        assert "3 x 7 = 21 tokens" in str(refused(model, *args, **kwargs))
    assert not others
    model(ids(2, 10))
    assert (len(others), len(model.calls)) == (1, 1)


def test_a_refused_encoder_reaches_nobody() -> None:
    encoder, others = Made(), list[Any]()
    encoder.register_forward_pre_hook(lambda *_: others.append(1))
    limit_tokens(Made(encoder=encoder), 20, 8, PLAIN)
    for args, kwargs in (((ids(3, 7),), {}), ((), {"inputs_embeds": torch.zeros(3, 7, 4)})):
        assert "3 x 7 = 21 tokens" in str(refused(encoder, *args, **kwargs))
    assert not others
    encoder(ids(2, 10))
    assert len(encoder.calls) == 1


def test_what_is_in_a_model_without_an_encoder_is_not_held() -> None:
    """Of a model that is no encoder and decoder, what it calls inside is counted with it."""
    inner = Made()
    model = Made()
    model.encoder = inner
    limit_tokens(model, 20, 8, PLAIN)
    inner(ids(3, 7))
    assert len(inner.calls) == 1
