"""Tables of the fastest ways of products: what they change, and that a damaged one changes nothing."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.backends import MadeBackend, MadeKernel

from tpde.codec.windows import sections
from tpde.cuda import tuning
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import KERNELS, MOST_ROWS, Product, ways_of
from tpde.cuda.window_products import DeviceWindow
from tpde.errors import InvalidDestination, InvalidInput

FACTS = DeviceFacts("NVIDIA H200 (made up)", (9, 0), 132, 227 << 10)
SHAPE = 4096, 8192


class Made:
    """A matrix on a device of some facts, and the launches that were made for it."""

    def __init__(self, launch_on: Any, facts: DeviceFacts = FACTS, clusters: int = 15) -> None:
        self._launch_on, self._facts, self._clusters = launch_on, facts, clusters
        self.launched: list[tuple[str, Any]] = []
        self.again()

    def again(self) -> None:
        """As another process would find it: nothing of a table is remembered, nor a launch."""
        tuning._table.cache_clear()
        self._launch_on(MadeBackend(self._kernel, self._facts))
        self.device = DeviceWindow(sections(*SHAPE), 1 << 20, 0)

    def _kernel(self, source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        def make(*_: Any, **__: Any) -> Any:
            return lambda *arguments: self.launched.append((name, dict(defines)))

        return MadeKernel(make, self._clusters)

    def default(self, count: int) -> list[Product]:
        return ways_of(self._facts, self.device.window, count)

    def product(self, count: int) -> tuple[str, Any]:
        """What the first launch of a product is, but for what arranges x."""
        self.launched.clear()
        self.device.product(4096, SHAPE[1], count, 1 << 16, SHAPE[0], 0, 0, 1 << 20)
        return next(it for it in self.launched if it[0] != "arrange")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the table of the card is, in a cache of its own."""
    monkeypatch.setenv("TPDE_CACHE_DIR", str(tmp_path))
    found = tuning.table_path(FACTS)
    found.parent.mkdir()
    return found


@pytest.fixture
def made(path: Path, launch_on: Any) -> Made:
    return Made(launch_on)


def write(path: Path, by_count: dict[int, str], shape: tuple[int, int] = SHAPE) -> None:
    tuning.write_table(path, FACTS, KERNELS, {shape: by_count})


def test_without_a_table_the_order_is_the_kernels_own(made: Made) -> None:
    for count in range(1, MOST_ROWS + 1):
        ways = made.default(count)
        assert made.device.ways(count) == ways
        assert made.product(count) == (ways[0].name, ways[0].defines)


def test_ways_of_a_product_have_labels_of_their_own(made: Made) -> None:
    for count in range(1, MOST_ROWS + 1):
        labels = [it.label for it in made.default(count)]
        assert len(labels) > 1
        assert len(set(labels)) == len(labels)
    assert [it.label for it in made.default(1)] == [
        "product NB=8 SHARED=0 BLOCKS=2",
        "product NB=8 SHARED=1 BLOCKS=2",
        "group_product NB=16 WIDE=12 EACH=1 STAGES=4 STREAMS=0 INBOXES=2",
        "group_product NB=16 WIDE=8 EACH=1 STAGES=4 STREAMS=0 INBOXES=2",
    ]


def test_what_a_table_names_comes_first(made: Made, path: Path) -> None:
    """Of every way, at every count: the others follow in their order."""
    for count in (1, 8, 9, 16, 32, 64):
        ways = made.default(count)
        for how in ways:
            write(path, {count: how.label})
            made.again()
            assert made.device.ways(count) == [how, *(it for it in ways if it is not how and it != how)]
            assert made.product(count) == (how.name, how.defines)


def test_a_table_is_left_out_where_the_environment_says_so(
    made: Made, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = made.default(16)
    write(path, {16: ways[-1].label})
    made.again()
    for said, first in (("0", ways[0]), ("1", ways[-1]), ("", ways[-1])):
        monkeypatch.setenv("TPDE_TUNING", said)
        assert made.device.ways(16)[0] == first
    path.write_text("no table")
    monkeypatch.setenv("TPDE_TUNING", "0")
    made.again()
    assert made.device.ways(16) == ways  # without a warning


def test_a_table_is_of_its_shapes(made: Made, path: Path) -> None:
    ways = made.default(16)
    write(path, {16: ways[-1].label}, (SHAPE[0], SHAPE[1] + 256))
    made.again()
    assert made.device.ways(16) == ways


def test_the_next_larger_count_decides_where_as_many_rows_are_multiplied_at_a_time(
    made: Made, path: Path
) -> None:
    last = {count: made.default(count)[-1] for count in (4, 16, MOST_ROWS)}
    write(path, {count: it.label for count, it in last.items()})
    made.again()
    for count in range(1, MOST_ROWS + 1):
        near = next(it for it in last if it >= count)
        measured = near == 4 or (near == 16 and count > 8) or count > 32
        expected = last[near].label if measured else made.default(count)[0].label
        assert made.device.ways(count)[0].label == expected, count


def test_rows_beyond_what_was_measured_are_as_without_a_table(made: Made, path: Path) -> None:
    write(path, {40: made.default(40)[-1].label})
    made.again()
    assert made.device.ways(41) == made.default(41)


def test_a_way_that_a_part_of_a_device_has_no_room_for_is_passed_over(path: Path, launch_on: Any) -> None:
    made = Made(launch_on, clusters=0)
    write(path, {16: made.default(16)[1].label})
    made.again()
    assert made.device.ways(16)[0].grouped
    assert made.product(16)[0] == "product"


def test_nothing_is_read_before_a_product(path: Path, launch_on: Any) -> None:
    path.write_text("no table")
    made = Made(launch_on)  # and the modules are imported
    with pytest.warns(RuntimeWarning, match="is not JSON"):
        made.product(1)


def test_another_backend_of_the_same_card_reads_it_once(made: Made, path: Path, launch_on: Any) -> None:
    path.write_text("no table")
    with pytest.warns(RuntimeWarning):
        made.product(1)
    made.product(2)  # a warning would be an error
    launch_on(MadeBackend(made._kernel, FACTS))
    made.product(3)


def changed(path: Path, **fields: Any) -> str:
    return json.dumps(json.loads(path.read_text()) | fields)


CARD = {"name": "another", "capability": [9, 0], "multiprocessors": 132, "shared_bytes": 227 << 10}
DAMAGE = {
    "empty": (lambda path: "", "is not JSON"),
    "cut": (lambda path: path.read_text()[:-20], "is not JSON"),
    "no text": (lambda path: b"\xff\xfe\x00{", "is not JSON"),
    "deep": (lambda path: "[" * 100_000, "is not JSON"),
    "digits": (lambda path: "9" * 100_000, "is no(t JSON| table)"),
    "a list": (lambda path: "[]", "is no table"),
    "large": (lambda path: " " * (1 << 20) + "{}", "more than 1048576 bytes"),
    "newer": (lambda path: changed(path, version=2), "of another version"),
    "another card": (lambda path: changed(path, card=CARD), "of another card"),
    "older kernels": (lambda path: changed(path, kernels="0" * 64), "of other kernels"),
    "no kernels": (lambda path: "{}", "of another version"),
    "no choices": (lambda path: changed(path, choices=[]), "has no `choices`"),
    "no shape": (lambda path: changed(path, choices={"4096x": {}}), "the shape `4096x`"),
    "a shape of nothing": (lambda path: changed(path, choices={"0x8192": {}}), "the shape `0x8192`"),
    "a shape alone": (lambda path: changed(path, choices={"4096x8192": 5}), "the shape `4096x8192`"),
    "no rows": (lambda path: changed(path, choices={"4096x8192": {"0": "a"}}), "names `0` rows"),
    "too many rows": (lambda path: changed(path, choices={"4096x8192": {"65": "a"}}), "names `65` rows"),
    "no number": (
        lambda path: changed(path, choices={"4096x8192": {"\x1b[2J": "a"}}),
        r"names `\\x1b\[2J` rows",
    ),
    "no way": (lambda path: changed(path, choices={"4096x8192": {"1": None}}), "names the way `None`"),
    "a long way": (lambda path: changed(path, choices={"4096x8192": {"1": "a" * 201}}), "names the way `aaa"),
    "another way": (
        lambda path: changed(path, choices={"4096x8192": {"1": "product NB=9", "2": "nothing"}}),
        "names `product NB=9` for 4096 x 8192 words and 1 rows of x, which is no way of that product",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_table_that_cannot_be_used_warns_once_and_changes_nothing(
    kind: str, made: Made, path: Path
) -> None:
    make, says = DAMAGE[kind]
    write(path, {it: made.default(it)[-1].label for it in (4, 16)})
    text = make(path)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    made.again()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ways = [made.device.ways(count) for count in range(1, MOST_ROWS + 1)]
        first = made.product(16)
    (warning,) = said
    assert warning.category is RuntimeWarning
    assert re.search(says, str(warning.message))
    assert str(path) in str(warning.message)
    assert "run `tpde tune` again, or remove it" in str(warning.message)
    assert len(str(warning.message)) < 600
    assert str(warning.message).isprintable()
    assert ways == [made.default(count) for count in range(1, MOST_ROWS + 1)]
    assert first == (made.default(16)[0].name, made.default(16)[0].defines)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_what_is_no_file_is_not_waited_for(kind: str, made: Made, path: Path) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    with pytest.warns(RuntimeWarning, match="run `tpde tune` again"):
        assert made.device.ways(1) == made.default(1)


def test_entries_beside_one_that_is_unknown_are_followed(made: Made, path: Path) -> None:
    how = made.default(16)[1]
    write(path, {1: "nothing", 16: how.label})
    made.again()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert made.device.ways(1) == made.default(1)
        assert made.device.ways(16)[0] == how
    assert len(said) == 1


def test_what_is_written_is_read(path: Path) -> None:
    choices = {(5, 7): {8: "b", 1: "a"}, SHAPE: {64: "c d=1"}}
    tuning.write_table(path, FACTS, KERNELS, choices)
    assert tuning.read_table(path, FACTS, KERNELS) == choices
    tuning.write_table(path, FACTS, KERNELS, {})
    assert tuning.read_table(path, FACTS, KERNELS) == {}
    assert [it.name for it in path.parent.iterdir()] == ["NVIDIA-H200-made-up-sm_90-132.json"]
    with pytest.raises(InvalidInput, match="another card"):
        tuning.read_table(path, FACTS._replace(multiprocessors=66), KERNELS)


def test_a_table_that_would_not_be_read_is_not_written(path: Path) -> None:
    write(path, {1: "a"})
    before = path.read_bytes()
    many = {(1, number): {1: "a" * 100} for number in range(1, 10_000)}
    with pytest.raises(InvalidDestination, match="1048576 at most are read"):
        tuning.write_table(path, FACTS, KERNELS, many)
    assert path.read_bytes() == before


def test_cards_have_tables_of_their_own(path: Path) -> None:
    part = FACTS._replace(multiprocessors=16)
    other = FACTS._replace(name="../../ /etc\x00/" + "x" * 300)
    assert len({path, tuning.table_path(part), tuning.table_path(other)}) == 3
    assert tuning.table_path(other).parent == path.parent
    assert len(tuning.table_path(other).name) < 120
