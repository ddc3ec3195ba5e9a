"""Packed weights in files and other processes: pickles without code, hostile ones are refused."""

from __future__ import annotations

import copy
import io
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from support.models import assert_same_bits
from support.parameters import packed
from support.small import IDS, Model, torch

from tpde.errors import Corrupt, InvalidInput, PackedWeight
from tpde.nn import pack_module
from tpde.weights.packed_tensor import rebuild_tensor
from tpde.weights.parameter import rebuild_parameter


def test_state_dicts_are_saved_without_code(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    assert file.tell() < 0.8 * sum(it.nbytes for it in plain.state_dict().values()) + 50_000
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert found["embed.weight"].packed is found["head.weight"].packed
    again = pack_module(Model().to(torch.bfloat16), min_bytes=0)
    again.load_state_dict(found)
    assert_same_bits(again(IDS), plain(IDS))


@pytest.mark.parametrize("shared", [False, True])
def test_another_process_gets_the_model(shared: bool, pair: tuple[Model, Model]) -> None:
    """Sending a model moves its blobs to shared memory, where they are: the sender must notice."""
    plain, ours = pair
    if shared:
        assert ours.share_memory() is ours
        assert all(it.is_shared() for it in ours.parameters())
        assert_same_bits(ours(IDS), plain(IDS))
    context = torch.multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(ours, sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(120)
        found = receiver.recv()
    except (EOFError, multiprocessing.ProcessError) as error:
        raise AssertionError("the other process ended") from error
    finally:
        process.join(60)
        process.kill()  # if it hangs
    assert found == plain(IDS).view(torch.int16).tolist()
    assert_same_bits(ours(IDS), plain(IDS))
    assert_same_bits(copy.deepcopy(ours)(IDS), plain(IDS))


def _run(model: Any, sender: Any) -> None:
    with torch.no_grad():
        sender.send(model(IDS).view(torch.int16).tolist())


def test_a_damaged_pickle_is_refused(weight: Any) -> None:
    ours, file = packed(weight), io.BytesIO()
    ours.packed.sources[0].blob[40] ^= 0xFF
    torch.save({"w": ours}, file)
    file.seek(0)
    with pytest.raises((Corrupt, InvalidInput), match="w"):
        torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "state",
    [
        {"blobs": [{}, {}]},
        {"blobs": [None, None]},
        {"blobs": None},
        {"blobs": []},
        {"blobs": [torch.zeros(3), torch.zeros(3)]},
        {"names": None},
        {"names": ["w"]},
        {"names": [7, "w"]},
        {"shape": [2, 96, 64]},
        {"shape": (10**30, 96, 64)},
        {"shape": (1 << 62, 1 << 62, 0)},
        {"shape": ("a", 96, 64)},
        {"shape": (2.0, 96, 64)},
        {"shape": (-2, -96, 64)},
        {"shape": (3, 96, 64)},
        {"name": None},
        {"tile_bytes": "x"},
        {"tile_bytes": -512},
        {"tile_bytes": 1 << 62},
    ],
    ids=repr,
)
def test_hostile_pickles_are_refused(state: Any, weight: Any) -> None:
    blob = packed(weight).packed.sources[0].blob
    valid = {"blobs": [blob, blob], "names": ["a", "b"], "shape": (2, 96, 64), "name": "w", "tile_bytes": 0}
    assert_same_bits(rebuild_tensor(**valid).decoded(), torch.stack([weight, weight]))
    with pytest.raises(InvalidInput):
        rebuild_tensor(**(valid | state))


@pytest.mark.parametrize(
    "memory_format",
    [
        *("torch.strided", "channels_last", "", 7, None, [], torch.channels_last),
        *("torch.channels_last", "torch.channels_last_3d"),  # of weights that are no matrices
    ],
)
def test_pickles_of_formats_that_a_weight_cannot_have_are_refused(memory_format: Any, weight: Any) -> None:
    made = packed(weight).packed
    assert rebuild_parameter(made, True, "torch.contiguous_format").packed is made
    with pytest.raises(InvalidInput, match=r"`w`.*memory format"):
        rebuild_parameter(made, True, memory_format)
    with pytest.raises(InvalidInput, match="no packed weight, but a Tensor"):
        rebuild_parameter(weight, True, "torch.contiguous_format")  # type: ignore[arg-type]


def test_pytorchs_old_format_is_refused(pair: tuple[Model, Model], tmp_path: Path) -> None:
    """Blobs that `torch.load` makes from it have no bytes yet when they are checked."""
    path = tmp_path / "old.pt"
    for saved in (pair[1], pair[1].state_dict(), pair[1].head.weight):
        with pytest.raises(PackedWeight, match=r"`embed.weight` is packed.*old file format"):
            torch.save(saved, path, _use_new_zipfile_serialization=False)
