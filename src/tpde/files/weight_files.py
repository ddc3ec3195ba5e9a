"""Which files of a model directory are packed, and under which names.

`*.safetensors` files are, under their own names. Weights in pickles, such as `pytorch_model.bin`, are packed
as the safetensors files that they would be: no library reads packed pickles. What is read by libraries that
know nothing of packed weights stays as it is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tpde.errors import AlreadyPacked, InvalidInput, MissingShard, NotPacked, TpdeError, printable
from tpde.files.documents import read_modules
from tpde.files.file_kinds import PICKLES, SAFETENSORS, folder_of, last_of, safetensors_name
from tpde.files.packed_state import MAKE_PLAIN, packing_configs, refuse_packed
from tpde.files.shards import ShardIndex, is_index, read_index, whole_file
from tpde.files.walk import EXCLUDED, FolderTree, follow, walk

ADAPTER_CONFIG = "adapter_config.json"
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$", re.ASCII)
_ADAPTER = re.compile(r"(adapter_model|pytorch_lora_weights)[^/]*\.safetensors")


@dataclass(frozen=True)
class Weights:
    """What is packed of a directory.

    Attributes
    ----------
    files : dict of str to str
        Names under which weight files are packed, by their names in the source.
    indexes : dict of str to ShardIndex
        Indexes of shards by the names that they get, naming files as these are named then.
    sources : dict of str to str
        The names in the source of those that get others.
    """

    files: dict[str, str] = field(default_factory=dict)
    indexes: dict[str, ShardIndex] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def read_by_others(root: Path, names: Collection[str]) -> set[str]:
    """Those of some weight files that neither transformers nor diffusers read.

    Of modules of sentence-transformers other than transformers' own, and adapters, which PEFT and diffusers
    read: packed, they would be taken for adapters that change nothing.
    """
    modules = [
        str(it["path"])
        for it in read_modules(root)
        if it.get("path") and str(it.get("type", "")).rpartition(".")[2] != "Transformer"
    ]
    return {
        name
        for name in names
        if _ADAPTER.fullmatch(last_of(name)) or any(name.startswith(f"{it}/") for it in modules)
    }


def choose(tree: FolderTree) -> Weights:
    """Choose what is packed of a directory.

    Raises
    ------
    MissingShard
        If an index names a file that is not taken.
    InvalidInput
        If there is nothing to pack, or an index is none.
    """
    weights = [name for name in tree.files if name.endswith(SAFETENSORS)]
    others = read_by_others(tree.root, weights)
    found = Weights(
        files={name: name for name in weights if name not in others},
        indexes={name: it for name in _index_names(tree) if (it := _index(tree, name)) is not None},
    )
    _choose_pickles(tree, {folder_of(name) for name in found.files}, found)
    if not found.files:
        raise _nothing(tree, others)
    return found


def _choose_pickles(tree: FolderTree, beside: Collection[str], found: Weights) -> None:
    """Add the weights in pickles, but those beside safetensors, which are read in their place."""
    for name in tree.files:
        made = safetensors_name(name)
        if made is None or folder_of(name) in beside or read_by_others(tree.root, [made]):
            continue
        if not made.endswith(".json"):
            found.sources[made], found.files[name] = name, made
            continue
        index, folder = _index(tree, name), PurePosixPath(folder_of(name))
        if index is None:
            continue
        found.sources[made], found.indexes[made] = name, as_safetensors(index)
        for shard in index.names():
            source = follow(str(folder / shard), tree.links) or shard
            found.files[source] = str(folder / _shard_name(shard))
            found.sources[found.files[source]] = source
    taken = sorted(found.sources.keys() & {*tree.files, *tree.links, *tree.folders})
    if taken:
        raise InvalidInput(
            f"`{printable(tree.root / found.sources[taken[0]])}` would be packed as `{printable(taken[0])}`, "
            "which is there already",
            hint="remove one of them, or leave it out with `--exclude`",
            where=str(tree.root),
        )


def _shard_name(name: str) -> str:
    return safetensors_name(name) or str(PurePosixPath(name).with_suffix(SAFETENSORS))


def as_safetensors(index: ShardIndex) -> ShardIndex:
    """An index of shards in pickles, as it is for the safetensors files that these become."""
    return index.with_files({name: _shard_name(name) for name in index.names()})


def _index_names(tree: FolderTree) -> list[str]:
    """Indexes of safetensors shards, and what has the name of one and can be none, which reading says."""
    left = [it.name for it in tree.left_out if not it.expected]
    return [it for it in (*tree.files, *tree.links, *tree.folders, *left) if is_index(it)]


def _index(tree: FolderTree, name: str) -> ShardIndex | None:
    """Read an index, and make sure that the files which it names are there; None of one that is left over."""
    index, missing = _missing(tree, name)
    if missing:
        raise missing[0]
    return index


def _missing(tree: FolderTree, name: str) -> tuple[ShardIndex | None, list[MissingShard]]:
    """An index, with an error for each file that it names and that is not there.

    None of one that transformers left beside a whole model which it saved in the place of one in shards: none
    of them is there. It is a file like others then.
    """
    if not (tree.root / name).is_file():  # a link may lead nowhere
        raise InvalidInput(f"`{printable(tree.root / name)}` is not a regular file", hint="fetch it again")
    index, files, folder = read_index(tree.root / name), set(tree.files), PurePosixPath(folder_of(name))

    def there(file: str) -> bool:
        return follow(str(folder / file), tree.links) in files

    names = index.names()
    missing = [it for it in names if not there(it)]
    if len(missing) == len(names) and there(whole_file(last_of(name))):
        return None, []
    return index, [
        MissingShard(
            f"`{index.path}` names the shard `{printable(it)}`, which is missing",
            hint="fetch it: all shards that the index names are needed",
            where=str(index.path.parent / it),
        )
        for it in missing
    ]


def _nothing(tree: FolderTree, others: Collection[str]) -> InvalidInput:
    """The error for a directory that has no weights to pack."""
    where = str(tree.root)
    if any(it.reason == EXCLUDED for it in tree.left_out):
        with contextlib.suppress(TpdeError):
            choose(walk(tree.root))
            return InvalidInput(f"all weights of `{where}` are excluded", hint="exclude less", where=where)
    if others or any(last_of(it) == ADAPTER_CONFIG for it in tree.files):
        return InvalidInput(
            f"`{where}` holds an adapter, which PEFT and diffusers read, and no model",
            hint="use it as it is, on a packed model too",
            where=where,
        )
    states = [it for it in tree.files if PurePosixPath(it).suffix in PICKLES]
    hint = "choose another folder"
    if states:
        hint = f"name a state dict itself, such as `{printable(tree.root / states[0])}`, to pack it as a file"
    return InvalidInput(f"`{where}` has no `*.safetensors` file", hint=hint, where=where)


def check_shards(tree: FolderTree) -> list[str]:
    """The safetensors files of a directory, with all that its indexes name.

    Raises
    ------
    MissingShard
        If a file that an index names is not there, or any that a packed model needs.
    InvalidInput
        If an index is none, or there is neither a file nor a configuration that says that weights are packed.
    """
    for error in missing_shards(tree):
        raise error
    return [name for name in tree.files if name.endswith(SAFETENSORS)]


def missing_shards(tree: FolderTree) -> list[MissingShard]:
    """An error for each weight file of a directory that is not there: see `check_shards`."""
    found = [error for name in _index_names(tree) for error in _missing(tree, name)[1]]
    weights = [name for name in tree.files if name.endswith(SAFETENSORS)]
    configs = packing_configs(tree)
    if not weights and not configs:
        raise _nothing(tree, ())
    model = [it for it in weights if it not in read_by_others(tree.root, weights)]
    whole = {folder_of(it) for it in model if not _SHARD.search(it)}
    # Those in pickles are plain, whatever a configuration says: unpacking mends it.
    pickles = [it for it in tree.files if safetensors_name(it) is not None]
    whole.update(map(folder_of, (*_index_names(tree), *pickles)))
    for name in configs:
        if folder_of(name) not in whole:
            beside = any(folder_of(it) == folder_of(name) for it in model)
            what = "an index of the shards" if beside else "a weight file"
            found.append(
                MissingShard(
                    f"`{printable(tree.root / name)}` says that the weights are packed, and {what} beside it "
                    "is missing",
                    hint="fetch it",
                    where=str(tree.root / name),
                )
            )
    return found


def not_packed(folder: Path, message: str, hint: str = "pack it with `tpde pack` first") -> NotPacked:
    """The error for a directory that should be packed and is not, with a hint that works.

    Parameters
    ----------
    folder : Path
        The directory.
    message : str
        What is wrong.
    hint : str
        What to do if it can be packed. Else the error says why it cannot be, and what to do about that.
    """
    try:
        tree = walk(folder)
        refuse_packed(tree, choose(tree).files)
    except AlreadyPacked:
        hint = MAKE_PLAIN
    except TpdeError as error:
        return NotPacked(f"{message}; {error.message}", hint=error.hint, where=str(folder))
    return NotPacked(message, hint=hint, where=str(folder))
