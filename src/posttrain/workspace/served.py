"""The server of a workspace, if any, to which commands in its folder connect; and the servers of its channels."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.domain.errors import PosttrainError
from posttrain.execution.processes import process_alive, process_name
from posttrain.store.atomic import is_held, make_folder, read_json, write_json

LOCK = "server.lock"  # held by the server while it lives
PLACE = "server.json"  # the server's address


@dataclass(frozen=True, slots=True)
class Served:
    """The address of a workspace's server."""

    url: str
    key: str = field(repr=False)  # the key of users who may read the folder


def served_at(root: Path) -> Served | None:
    """Return the address of a workspace's server; None: the workspace is not served, or its server is starting."""
    place = root / PLACE
    try:
        if not place.exists() or not is_held(root / LOCK):
            return None
        said = read_json(place)
        return Served(str(said["url"]), str(said["key"]))
    except (PosttrainError, OSError, KeyError, TypeError):  # the file is being written or removed
        return None


def announce_model(root: Path, project: str, channel: str, served: Served) -> Callable[[], None]:
    """Record the address of a channel's served model; return a function that removes the record.

    The key in it is valid only for this server, and only who may read the folder can read it.
    """
    place = _model(root, project, channel)
    make_folder(place.parent)
    write_json(place, {"url": served.url, "key": served.key, "process": process_name()})

    def conceal() -> None:
        with suppress(PosttrainError, OSError):
            if read_json(place)["process"] == process_name():  # another server of the channel may have started since
                place.unlink()

    return conceal


def model_at(root: Path, project: str, channel: str) -> Served | None:
    """Return the address of a channel's served model on this machine; None: there is none."""
    try:
        said = read_json(_model(root, project, channel))
        return Served(str(said["url"]), str(said["key"])) if said and process_alive(str(said["process"])) else None
    except (PosttrainError, OSError, KeyError, TypeError, ValueError):
        return None


def _model(root: Path, project: str, channel: str) -> Path:
    return root / "serving" / f"{project} {channel}.json"


def server_of(root: Path) -> str:
    """Return the recorded server of a workspace as text: `by process 4711 at http://127.0.0.1:8460`."""
    with suppress(PosttrainError, OSError):
        said = read_json(root / PLACE)
        if isinstance(said, dict) and {"pid", "url"} <= said.keys():
            return f"by process {said['pid']} at {said['url']}"
    return "by another process, which is starting"


def is_served(root: Path) -> bool:
    """Return whether a server serves this workspace and drives its runs."""
    return is_held(root / LOCK)
