"""Servers that this user logged in to: their tokens, in a file that nobody else may read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.client.remote import remote_control
from posttrain.client.transport import check_address
from posttrain.domain.errors import InputError, WorkspaceError
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store.atomic import make_folder, read_json, write_json

if TYPE_CHECKING:
    from posttrain.api.control import Control

TOKEN_VARIABLE = "POSTTRAIN_TOKEN"
CONFIG_VARIABLE = "POSTTRAIN_CONFIG"
_FILE = "servers.json"
_OTHERS = 0o077


def logged_in(url: str, project: str = "", token: str | None = None) -> Control:
    """`Control` over a server, with a token, or that of the environment, or that of the login.

    Raises:
        InputError: there is neither.
        WorkspaceError: others may read the file with the tokens.
    """
    url = url.rstrip("/")
    check_address(url)
    known = _logins().get(url, {})
    token = token or os.environ.get(TOKEN_VARIABLE) or known.get("token")
    if not token:
        raise InputError(f"server {url}: nobody is logged in there; posttrain login {url}, or set {TOKEN_VARIABLE}")
    return remote_control(url, token, project or known.get("project") or DEFAULT_PROJECT)


def log_in(url: str, token: str, project: str) -> None:
    """Keep a token for a server. Whoever calls it made sure that it is good."""
    make_folder(_path().parent)
    write_json(_path(), _logins() | {url.rstrip("/"): {"token": token, "project": project}})


def log_out(url: str) -> bool:
    """Forget the token for a server; False: there was none."""
    known = _logins()
    if known.pop(url.rstrip("/"), None) is None:
        return False
    write_json(_path(), known)
    return True


def servers() -> list[str]:
    """Servers that this user logged in to."""
    return sorted(_logins())


def _path() -> Path:
    named = os.environ.get(CONFIG_VARIABLE)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "posttrain"
    return (Path(named) if named else home) / _FILE


def _logins() -> dict[str, dict[str, Any]]:
    path = _path()
    if path.exists() and path.stat().st_mode & _OTHERS:
        raise WorkspaceError(f"{path}: holds tokens, and others may read it; chmod 600 {path}")
    found = read_json(path)
    return dict(found) if isinstance(found, dict) else {}
