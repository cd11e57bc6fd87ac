"""The server of a workspace, if any, to which commands in the workspace's folder connect."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.domain.errors import PosttrainError
from posttrain.store.atomic import is_held, read_json

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
