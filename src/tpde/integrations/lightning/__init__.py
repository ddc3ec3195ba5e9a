"""Checkpoints of Lightning's `Trainer` in a store (docs/guides/trainers.md).

>>> from lightning.pytorch import Trainer  # doctest: +SKIP
>>> from tpde.integrations.lightning import StoredCheckpointIO  # doctest: +SKIP
>>> trainer = Trainer(plugins=[StoredCheckpointIO()])  # doctest: +SKIP
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpde.errors import InvalidInput, MissingDependency
from tpde.io.paths import anchored, given_path, is_url
from tpde.store.linked import STORE, LinkedSteps, load_linked

if TYPE_CHECKING:
    _Base = object
    _Ordinary: Any
else:
    try:
        from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as _Base
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _Ordinary
    except ImportError:
        try:
            from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO as _Base
            from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO as _Ordinary
        except ImportError as error:
            raise MissingDependency(
                f"`tpde.integrations.lightning` needs Lightning, which cannot be imported ({error})",
                hint="run `pip install lightning`",
            ) from None

__all__ = ["StoredCheckpointIO"]

_TORCH = b"PK", b"\x80"  # how what `torch.save` writes begins: a zip file, before PyTorch 1.6 a pickle


class StoredCheckpointIO(_Base):
    """Writes a Trainer's checkpoints as steps of a store beside them.

    A checkpoint's file names a step of `tpde-store` in its folder. Removing it removes the step as soon as no
    other stands on it. `LightningModule.load_from_checkpoint` reads files by itself and does not know stores:
    take `load_checkpoint(path)["state_dict"]`.

    Parameters
    ----------
    keyframe_every : int
        Of so many checkpoints one is stored as a whole.
    background : bool
        Write while training goes on, until a checkpoint is removed: that waits. The newest checkpoint may
        then be without its step if the process is killed. One that replaces another is not written so.
    """

    def __init__(self, *, keyframe_every: int = 16, background: bool = False) -> None:
        self._every, self._background = keyframe_every, background
        self._folders: dict[Path, LinkedSteps] = {}

    def _steps(self, path: Path) -> LinkedSteps:
        folder = path.parent
        if folder not in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
            self._folders[folder] = LinkedSteps(
                folder / STORE,
                lambda: folder.glob("*"),
                keyframe_every=self._every,
                background=self._background,
            )
        return self._folders[folder]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint.

        Raises
        ------
        InvalidInput
            If it holds something that a store does not take, naming where; if there are storage options; if
            the path is a URL.
        TpdeError, OSError
            As for `CheckpointStore.save`.
        """
        if storage_options is not None:
            raise InvalidInput("a store takes no `storage_options`", hint="leave them out")
        link = anchored(given_path(path))
        self._steps(link).save(link, checkpoint, int(checkpoint.get("global_step", 0)), forget=True)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint. There is no pickle in it, whatever `weights_only` says.

        An ordinary one, that Lightning wrote without this, is loaded by Lightning.

        Raises
        ------
        InvalidInput
            If the file names no step, or one that is not there.
        TpdeError
            As for `CheckpointStore.load`.
        """
        link = anchored(Path(path))
        if link.parent in self._folders:
            self._folders[link.parent].store.wait()
        if is_url(path) or _is_ordinary(link):
            given = {"map_location": map_location, "weights_only": weights_only}
            options = {name: it for name, it in given.items() if it is not None}
            ordinary: dict[str, Any] = _Ordinary().load_checkpoint(path, **options)
            return ordinary
        place = None if callable(map_location) or isinstance(map_location, dict) else map_location
        found: dict[str, Any] = load_linked(link.parent / STORE, link, map_location=place)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, and what no other stands on, when what is being written is there.

        Raises
        ------
        Exception
            What writing that failed with: the checkpoint stays, which may be the last one.
        """
        link = anchored(given_path(path))
        steps = self._steps(link)
        steps.store.wait()
        link.unlink(missing_ok=True)
        steps.forget()

    def teardown(self) -> None:
        """Wait for what is being written, and let others write.

        Raises
        ------
        Exception
            What that failed with.
        """
        while self._folders:
            self._folders.popitem()[1].store.close()


def _is_ordinary(path: Path) -> bool:
    """Whether a file is a checkpoint that `torch.save` wrote."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2).startswith(_TORCH)
