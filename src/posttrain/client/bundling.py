"""A run file with the local files that it names, sent to a server, which plans and sees no path of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.api.operations import FileRef, RunFile
from posttrain.client.blobs import Sender
from posttrain.data.parts import data_files, is_pattern
from posttrain.data.refs import Source, local_path, parse_ref
from posttrain.domain.errors import InputError
from posttrain.domain.places import is_lock
from posttrain.domain.runspec import Setting, overridden, read_yaml

_RECIPE = "recipe"


class Bundle:
    """What one run file needs.

    Args:
        sender: where its files go.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.files: dict[str, FileRef] = {}

    def of(self, path: Path, setting: Setting = ()) -> RunFile:
        """The run file as it is sent; values in the place of its own are written into it.

        Raises:
            InputError: it, or a file that it names, cannot be read.
        """
        if is_lock(path):
            return RunFile(path.name, _text(path))
        raw = overridden(read_yaml(path), setting)
        base = path.parent
        sent = dict(raw)
        if isinstance(raw.get("model"), str):
            sent["model"] = self._ref("model", raw["model"], base)
        if isinstance(raw.get("data"), Mapping):
            sent["data"] = {name: self._ref("dataset", text, base) for name, text in raw["data"].items()}
        if isinstance(raw.get("rewards"), Mapping):
            sent["rewards"] = {name: self._reward(use, base) for name, use in raw["rewards"].items()}
        if isinstance(raw.get("stages"), Mapping):
            for stage in raw["stages"].values():
                self._recipe(stage, base)
        text = _text(path) if sent == raw and not setting else yaml.safe_dump(sent, sort_keys=False, allow_unicode=True)
        return RunFile(path.name, text, self.files)

    def word(self, kind: str, text: str) -> str:
        """A word of the command line as the server can resolve it: a local file or folder is sent."""
        return str(self._ref(kind, text, Path()))

    def _ref(self, kind: str, text: Any, base: Path) -> Any:
        """A ref as the server can resolve it; what is none is left for the server to refuse."""
        if not isinstance(text, str):
            return text
        try:
            ref = parse_ref(text, kind)
        except InputError:
            return text
        if ref.source is not Source.PATH:
            return text
        path = local_path(ref, base)
        place = f"files/{len(self.files)}"
        if kind == "dataset" and is_pattern(path):
            for name, one in data_files(path, text).items():
                self.files[f"{place}/{name}"] = self._sender.send(one)
        else:
            self.files[f"{place}/{path.name}"] = self._sender.send(path, _left_behind)
        return f"./{place}/{path.name}"

    def _reward(self, use: Any, base: Path) -> Any:
        if not isinstance(use, Mapping):
            return self._ref("reward", use, base)
        sent = {**use, "ref": self._ref("reward", use.get("ref"), base)}
        if isinstance(use.get("files"), list):
            sent["files"] = [self._beside(text, base) for text in use["files"]]
        return sent

    def _beside(self, text: Any, base: Path) -> Any:
        path = base / Path(str(text)).expanduser()
        if not path.exists():
            return text
        place = f"files/{len(self.files)}/{path.name}"
        self.files[place] = self._sender.send(path, _left_behind)
        return f"./{place}"

    def _recipe(self, stage: Any, base: Path) -> None:
        """A user's dataflow lies beside the run file."""
        word = stage.get(_RECIPE) if isinstance(stage, Mapping) else None
        module = word.partition(":")[0] if isinstance(word, str) else ""
        if module and (base / f"{module}.py").is_file():
            self.files[f"{module}.py"] = self._sender.send(base / f"{module}.py")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}; check the path") from error


def _left_behind(name: str) -> bool:
    """What programs leave in a folder is no part of it, as in `data.catalog`."""
    return name.endswith(".pyc") or any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))
