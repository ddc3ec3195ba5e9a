"""Which experts a cache keeps: the least recently used makes room, and turns of layers are told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch")

from tpde.streaming.expert_cache import ExpertCache

pytestmark = pytest.mark.usefixtures("bounded")


class Model:
    """What `ExpertCache` does, with a list: the least recently used first."""

    def __init__(self, places: int) -> None:
        self.places, self.order, self.held = places, [], {}

    def evicted(self) -> int | None:
        return next((key for key in self.order if not self.held.get(key)), None)


@given(
    places=st.integers(1, 5),
    steps=st.lists(st.tuples(st.sampled_from(["want", "release", "clear"]), st.integers(0, 7)), max_size=80),
)
def test_least_recently_used(places: int, steps: list[tuple[str, int]]) -> None:
    cache, model = ExpertCache[int](places), Model(places)
    where: dict[int, int] = {}
    for step, key in steps:
        if step == "clear":
            if key == 0:
                cache.clear()
                model, where = Model(places), {}
        elif step == "release":
            if model.held.get(key):
                cache.release(key)
                model.held[key] -= 1
        elif key in model.order:
            assert cache.lookup(key) == where[key]
            model.order.remove(key)
            model.order.append(key)
            model.held[key] = model.held.get(key, 0) + 1
        else:
            assert cache.lookup(key) is None
            out = model.evicted() if len(model.order) == places else None
            place = cache.insert(key)
            if len(model.order) == places and out is None:
                assert place is None
                continue
            assert place is not None
            if out is not None:
                assert place == where.pop(out), "the least recently used that nobody holds makes room"
                model.order.remove(out)
            where[key] = place
            model.order.append(key)
            model.held[key] = 1
        assert len(cache) == len(model.order) <= places
        assert all(it in cache for it in model.order)
        assert len(set(where.values())) == len(where)
        assert all(0 <= it < places for it in where.values())


def routed(
    layers: int, experts: int, chosen: int, tokens: int, skew: float, again: float, seed: int
) -> list[list[tuple[int, int]]]:
    """What layers want in turn: experts drawn by Zipf's law, each layer's own; some chosen again."""
    draw = np.random.default_rng(seed)
    weights = [draw.permutation(1 / np.arange(1, experts + 1) ** skew) for _ in range(layers)]
    wanted: list[list[int]] = [[] for _ in range(layers)]
    calls = []
    for _ in range(tokens):
        for layer in range(layers):
            kept = [it for it in wanted[layer] if draw.random() < again]
            order = np.argsort(draw.exponential(size=experts) / weights[layer]).tolist()
            wanted[layer] = sorted(kept + [it for it in order if it not in kept][: chosen - len(kept)])
            calls.append([(layer, it) for it in wanted[layer]])
    return calls


def found(calls: list[list[tuple[int, int]]], places: int, *, turns: bool = True) -> int:
    """How many hits calls have; without telling of turns, the least recently used always makes room."""
    cache = ExpertCache[tuple[int, int]](places)
    for keys in calls:
        if turns:
            cache.turn(keys[0][0], len(keys))
        missing = [key for key in keys if cache.lookup(key) is None]
        for key in keys:
            if key in cache:
                cache.release(key)
        flying: list[tuple[int, int]] = []
        while missing or flying:
            while missing and cache.insert(missing[0]) is not None:
                flying.append(missing.pop(0))
            cache.release(flying.pop(0))
    return cache.hits


@given(
    layers=st.integers(1, 6),
    experts=st.integers(2, 12),
    chosen=st.integers(1, 4),
    places=st.integers(1, 72),
    skew=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    again=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
def test_as_many_are_found_as_if_the_least_recently_used_made_room(
    layers: int, experts: int, chosen: int, places: int, skew: float, again: float, seed: int
) -> None:
    """Or fewer by as many as there are places, whatever the routing; with `again` of 1 it does not change."""
    calls = routed(layers, experts, min(chosen, experts), 30, skew, again, seed)
    assert found(calls, places) >= found(calls, places, turns=False) - places


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_some_are_found_in_a_cache_too_small_for_a_token(skew: float) -> None:
    """32 layers that choose 2 of 8 experts each, and places for half of that."""
    calls = routed(32, 8, 2, 60, skew, 0.0, 0)
    assert found(calls, 32, turns=False) == 0
    assert found(calls, 32) > 0.09 * 2 * len(calls)


def test_what_fits_is_found_each_time() -> None:
    assert found(routed(5, 6, 2, 20, 0.0, 1.0, 0), 10) == 2 * 5 * 19


def in_turn(places: int, wanted: list[int], keys: int) -> tuple[ExpertCache[int], list[int | None]]:
    """A cache that is told of turns, and the places of so many keys, each of which is held only a moment."""
    cache = ExpertCache[int](places)
    for who, count in enumerate(wanted):
        cache.turn(who, count)
    found = []
    for key in range(keys):
        found.append(cache.insert(key))
        cache.release(key)
    return cache, found


def test_a_new_entry_makes_room_for_the_next_where_not_all_fit() -> None:
    """From one on, two others having been wanted by then; the eighth stays in place of the oldest."""
    cache, found = in_turn(2, [1, 2, 1], 12)
    assert found == [0, 1, *[0] * 8, 1, 1]
    assert 9 in cache
    cache, found = in_turn(2, [1, 2], 6)
    assert found == [0, 1, 0, 1, 0, 1], "all that others want in between fits"
    cache.turn("one", 1)
    cache.turn("one", 0)
    assert cache.insert(9) == 0, "what counts is how many it wanted last"


def test_forgotten_entries_are_held_no_longer() -> None:
    cache = ExpertCache[str](2)
    cache.insert("a")
    cache.clear()
    assert not len(cache)
    assert {cache.insert("b"), cache.insert("a")} == {0, 1}
    cache.release("a")
    assert cache.insert("c") is not None


def test_inserting_twice() -> None:
    cache = ExpertCache[str](2)
    cache.insert("a")
    with pytest.raises(ValueError, match="has a place already"):
        cache.insert("a")


def test_an_expert_is_held_by_all_who_hold_it() -> None:
    cache: ExpertCache[str] = ExpertCache(1)
    place = cache.insert("a")
    assert cache.lookup("a") == place
    cache.release("a")
    assert cache.insert("b") is None, "one still decodes it"
    cache.release("a")
    assert cache.insert("b") == place


def test_ctrl_c_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between giving an entry's place up and giving it to another."""

    def interrupted() -> bool:
        raise KeyboardInterrupt

    cache: ExpertCache[str] = ExpertCache(2)
    for key in ("a", "b"):
        cache.insert(key)
        cache.release(key)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_crowded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.insert("c")
    cache.clear()
    assert sorted((cache.insert("a"), cache.insert("b"))) == [0, 1]  # type: ignore[type-var]
