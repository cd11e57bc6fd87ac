"""The server of a workspace, if any, to which commands in its folder connect; and the servers of its channels."""

import time
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

    The key in it is valid only for this server, and only who may read the folder can read it. Each server has a record.
    """
    own = process_name()
    place = _models(root) / f"{project} {channel} {own.rpartition(':')[0].rpartition(':')[2]}.json"
    make_folder(place.parent)
    said = {"project": project, "channel": channel, "url": served.url, "key": served.key, "process": own}
    write_json(place, {**said, "at": time.time()})

    def conceal() -> None:
        with suppress(OSError):
            place.unlink(missing_ok=True)

    return conceal


def model_at(root: Path, project: str, channel: str) -> Served | None:
    """Return the address of the newest served model of a channel on this machine; None: there is none.

    Records of servers that were killed are removed.
    """
    newest: tuple[float, Served] | None = None
    for place in _models(root).glob("*.json") if _models(root).is_dir() else ():
        try:
            said = read_json(place)
            if not process_alive(str(said["process"])):
                place.unlink(missing_ok=True)
            elif (said["project"], said["channel"]) == (project, channel):
                found = float(said["at"]), Served(str(said["url"]), str(said["key"]))
                newest = found if newest is None or found[0] > newest[0] else newest
        except (PosttrainError, OSError, KeyError, TypeError, ValueError):  # it is being written or removed
            continue
    return newest[1] if newest else None


def _models(root: Path) -> Path:
    return root / "serving"


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
