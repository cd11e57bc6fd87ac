"""Transfer of files by digest between this machine and a server, including run files with their local files.

Files that the project already has are not sent again. Large files are transferred directly between this machine and the
server's store, if the store supports direct transfers. If a direct transfer fails, the user gets a message, and the
files are transferred through the server.

A `Bundle` is a run file with the local files that it names. The server plans the run file without any path of this
machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from posttrain.api.verbs import PREFIX, FileRef, RunFile
from posttrain.client.transport import HOPE, PATIENCE, DirectError, Transport, in_path, sent
from posttrain.data.files import data_files, is_pattern
from posttrain.data.refs import Source, local_path, parse_ref
from posttrain.domain.canonical import digest_bytes, verified
from posttrain.domain.errors import ConflictError, InfrastructureError, InputError, IntegrityError
from posttrain.domain.ids import is_lock
from posttrain.domain.overrides import Setting, overridden
from posttrain.domain.runspec import read_yaml
from posttrain.store.atomic import write_stream, writing
from posttrain.store.retries import patiently
from posttrain.store.trees import beside_model, file_digest, is_byproduct, not_taken, put_tree

_CHUNK = 8 << 20  # bytes per request
_LARGE = 8 << 20  # minimum size of a file, in bytes, for a direct transfer
_TRIES = 20  # tries without progress, while another client sends the same file
_RECIPE = "recipe"


class Sender:
    """Sends files to one project."""

    def __init__(self, transport: Transport, project: str, say: Callable[[str], None] = lambda _: None) -> None:
        self._transport, self._project, self._say = transport, project, say
        self._direct = True

    def send(self, path: Path, skip: Callable[[str], bool] = lambda _: False, *, follow_links: bool = False) -> FileRef:
        """Send a file, or a folder with its files; return a reference to the file or folder.

        Raises:
            InputError: the path does not exist or cannot be read.
        """
        if path.is_dir():
            if skip is beside_model and (line := not_taken(path)):
                self._say(line)
            digest = put_tree(self, path, follow_links=follow_links, skip=skip)  # type: ignore[arg-type]
            return FileRef(path.resolve().name, digest, "tree")
        if not path.is_file():
            raise InputError(f"{path}: no such file or folder; check the path")
        return FileRef(path.name, self.put_file(path), "file")

    def put(self, data: bytes) -> str:
        """Send bytes; return their digest."""
        digest = digest_bytes(data)
        self._send(digest, len(data), lambda start, length: data[start : start + length])
        return digest

    def put_file(self, path: Path) -> str:
        """Send a file in constant memory; return its digest."""
        digest, size = file_digest(path), path.stat().st_size

        def piece(start: int, length: int) -> bytes:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(length)

        if not self._sent_directly(digest, size, path):
            self._send(digest, size, piece)
        return digest

    def _sent_directly(self, digest: str, size: int, path: Path) -> bool:
        """Send a file directly to the store, unless the project has it; return whether the project has it now."""
        if not self._direct or size < _LARGE:
            return False
        place = in_path(PREFIX + "/blobs/{digest}", {"project": self._project, "digest": digest})
        state = self._state(place, size)
        if state["held"] or state["offset"]:
            return bool(state["held"])
        ticket = json.loads(self._transport.ask("POST", place + "/direct", body={"size": size}).body)
        if not ticket["url"]:
            self._direct = False
            return False
        try:
            sent(ticket["url"], ticket["headers"], path)
            self._transport.ask("POST", place + "/arrived", body={"size": size})
        except (DirectError, IntegrityError) as error:
            self._direct = False
            _tell(error)
            return False
        return True

    def _send(self, digest: str, size: int, piece: Callable[[int, int], bytes]) -> None:
        path = in_path(PREFIX + "/blobs/{digest}", {"project": self._project, "digest": digest})
        state, tries = self._state(path, size), 0
        while not state["held"]:
            start = int(state["offset"])
            data = piece(start, min(_CHUNK, size - start))
            if start < size and not data:
                raise InputError("a file became shorter while it was sent; send it again while no process writes to it")
            headers = {
                "upload-offset": str(start),
                "upload-length": str(size),
                "content-type": "application/octet-stream",
            }
            try:
                state = json.loads(self._transport.ask("PATCH", path, raw=data, headers=headers).body)
            except ConflictError:  # another client sends the file, or a response was lost
                state = self._state(path, size)
                tries = tries + 1 if int(state["offset"]) == start else 0
                if tries > _TRIES:
                    raise

    def _state(self, path: str, size: int) -> dict[str, int]:
        found: dict[str, int] = json.loads(self._transport.ask("GET", path + "/state", {"size": size}).body)
        return found


class Fetcher:
    """Fetches files from one project."""

    def __init__(self, transport: Transport, project: str) -> None:
        self._transport, self._project = transport, project
        self._direct = True

    def fetch(
        self, files: Mapping[str, Mapping[str, Any]], folder: Path, progress: Callable[[str], None] = lambda _: None
    ) -> dict[str, Path]:
        """Fetch files into a folder; return name → path. After an error, each file is either complete or absent.

        Args:
            files: name → digest and size in bytes, as the server reports them.

        Raises:
            IntegrityError: received bytes do not match their digest.
            WorkspaceError: the folder cannot be written.
        """
        made = {}
        for name, said in files.items():
            path = folder.joinpath(*PurePosixPath(name).parts)
            if not path.is_relative_to(folder) or ".." in path.relative_to(folder).parts:
                raise IntegrityError(f"the server names a file {name!r}, which would be outside {folder}")
            progress(name)
            self._fetch(str(said["digest"]), path)
            made[name] = path
        return made

    def _fetch(self, digest: str, path: Path) -> None:
        place = in_path(PREFIX + "/blobs/{digest}", {"project": self._project, "digest": digest})

        def fill(file: BinaryIO) -> None:
            wrong = IntegrityError(
                f"{path.name}: the received bytes do not have the digest {digest}; download the file again"
            )
            pieces = self._transport.pieces(place, direct=self._direct)
            file.writelines(verified(pieces, digest, lambda _: wrong))

        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)

        def whole() -> None:
            try:
                return write_stream(path, fill)
            except (DirectError, IntegrityError) as error:
                if not self._direct:
                    raise
                self._direct = False
                _tell(error)
            return write_stream(path, fill)

        patiently(whole, InfrastructureError, PATIENCE, HOPE)


def _tell(error: Exception) -> None:
    print(
        f"the server's store cannot be used from this machine ({error}), so files are transferred through the server",
        file=sys.stderr,
    )


def refuse_full(folder: Path) -> None:
    """Reject a path that is not an empty or new folder.

    Raises:
        InputError: the path is a file, or a folder that is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: must be a new or empty folder; name another")


class Bundle:
    """A run file and its local files.

    Args:
        sender: sends the files.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.files: dict[str, FileRef] = {}

    def of(self, path: Path, setting: Setting = ()) -> RunFile:
        """Return the run file in the form that is sent; `setting` replaces values in the file.

        Raises:
            InputError: the run file, or a file that it names, cannot be read.
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
        """Return a name from the command line in a form that the server can resolve; send a local file or folder."""
        return str(self._ref(kind, text, Path()))

    def _ref(self, kind: str, text: Any, base: Path) -> Any:
        """Return a ref in a form that the server can resolve; an invalid ref is left for the server to reject."""
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
            self.files[f"{place}/{path.name}"] = self._sender.send(
                path, beside_model if kind == "model" else is_byproduct
            )
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
        self.files[place] = self._sender.send(path, is_byproduct)
        return f"./{place}"

    def _recipe(self, stage: Any, base: Path) -> None:
        """Add the file of a user's dataflow, which is next to the run file."""
        word = stage.get(_RECIPE) if isinstance(stage, Mapping) else None
        module = word.partition(":")[0] if isinstance(word, str) else ""
        if module and (base / f"{module}.py").is_file():
            self.files[f"{module}.py"] = self._sender.send(base / f"{module}.py")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}; check the path") from error
