"""The best model of a stage so far: one folder in Hugging Face format, beside the checkpoints and inside each of them.

::

    best/step-00000040/           the model after 40 steps; replaced as a whole when a later one is better
    checkpoints/step-00000050/
        best/…                    the same files (hard links where the disk has them), named in COMMIT

So a job that goes on from a checkpoint has the best model of the steps before it, in whatever folder or workspace it
goes on, and there is one such model on the disk and, for a moment, the one that replaces it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from posttrain.domain.crashpoints import crashpoint
from posttrain.engine.weights.checkpoint import digest_file, sync

_INSIDE = "best"  # of a checkpoint


class BestModel:
    """The best model of one attempt.

    Args:
        folder: nothing else lies in it.
        write: writes the model as it is now into a folder that exists.
    """

    def __init__(self, folder: Path, write: Callable[[Path], object]) -> None:
        self._folder, self._write = folder, write
        self._kept: Path | None = None
        self._files: dict[str, str] = {}  # below it → digest

    @property
    def path(self) -> Path | None:
        """Where it is; None: there is none yet."""
        return self._kept

    def keep(self, step: int) -> None:
        """Write the model as it is now, and drop the one before.

        Raises:
            OSError: the disk is full or read-only; the one before is still there.
        """
        coming, place = self._folder / f".step-{step:08d}", self._folder / f"step-{step:08d}"
        for left in (coming, place):
            shutil.rmtree(left, ignore_errors=True)
        coming.mkdir(parents=True)
        self._write(coming)
        files = _files(coming)
        for name in files:
            sync(coming / name)
        for folder in {coming, *((coming / name).parent for name in files)}:
            sync(folder)
        crashpoint("best.before_rename")
        coming.rename(place)
        sync(self._folder)
        crashpoint("best.after_rename")
        self._hold(place)

    def put_into(self, checkpoint: Path) -> dict[str, str]:
        """Add it to a checkpoint that is being written; path in the checkpoint → digest."""
        if self._kept is None:
            return {}
        for name in self._files:
            target = checkpoint / _INSIDE / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self._kept / name, target)
            except OSError:  # a disk without links
                shutil.copyfile(self._kept / name, target)
                sync(target)
        for folder in {(checkpoint / _INSIDE / name).parent for name in self._files} | {checkpoint / _INSIDE}:
            sync(folder)
        return {f"{_INSIDE}/{name}": digest for name, digest in self._files.items()}

    def take_from(self, checkpoint: Path | None, step: int = 0) -> None:
        """Hold what a verified checkpoint has, and nothing else: what a lost process left behind is done again.

        Args:
            checkpoint: None: the stage begins at its beginning.
            step: after which it was written.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._kept, self._files = None, {}
        if checkpoint is None or not (checkpoint / _INSIDE).is_dir():
            return
        place = self._folder / f"step-{step:08d}"
        shutil.copytree(checkpoint / _INSIDE, place, copy_function=shutil.copyfile)
        for name in _files(place):
            sync(place / name)
        self._hold(place)

    def _hold(self, place: Path) -> None:
        self._kept, self._files = place, {name: digest_file(place / name) for name in _files(place)}
        for other in self._folder.iterdir():
            if other != place:
                shutil.rmtree(other, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
