"""The user's logins: the tokens of servers, in a file that no other user may read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.client.remote import remote_control
from posttrain.client.transport import Transport, check_address
from posttrain.domain.errors import AccessError, InputError, NotFoundError, WorkspaceError
from posttrain.domain.ids import PROJECT_VARIABLE
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store.atomic import make_folder, read_json, write_json

if TYPE_CHECKING:
    from posttrain.api.control import Control

TOKEN_VARIABLE = "POSTTRAIN_TOKEN"
CONFIG_VARIABLE = "POSTTRAIN_CONFIG"
_FILE = "servers.json"
_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class Login:
    """The tokens for one server, by the project for which each was issued."""

    tokens: Mapping[str, str]
    chosen: str = ""  # the project of the last login, the commands' default; "" after a logout from that project

    @property
    def project(self) -> str:
        """The default project of commands; "" without a login, or with several logins and no default."""
        return self.chosen or ("".join(self.tokens) if len(self.tokens) == 1 else "")


def logged_in(url: str, project: str = "", token: str | None = None) -> Control:
    """Return `Control` over a server, with `token`, or else the environment's token or the token of a login.

    Args:
        project: if it is "", the environment's project, the project of the last login, or `default` is used.

    Raises:
        InputError: there is no token, or there are several tokens and no project is named.
        WorkspaceError: other users may read the file with the tokens.
    """
    url = url.rstrip("/")
    check_address(url)
    known = login_of(url)
    project = project or os.environ.get(PROJECT_VARIABLE, "")
    asked = project or known.project
    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token and known.tokens:
        if not asked:
            raise InputError(
                f"server {url}: you are logged in to {' and '.join(known.tokens)} there; name one project: --project "
                "NAME"
            )
        # for a project without a login, the server's error contains the next action
        token = known.tokens.get(asked) or known.tokens.get(known.project) or next(iter(known.tokens.values()))
    if not token:
        of = f" --project {project}" if project else ""
        raise InputError(
            f"server {url}: you are not logged in there; posttrain login {url}{of}, or set {TOKEN_VARIABLE}"
        )
    return remote_control(url, token, asked or DEFAULT_PROJECT)


def login_of(url: str) -> Login:
    """Return this user's tokens for a server; a `Login` without tokens if there are none."""
    return _login(_logins().get(url.rstrip("/")))


def log_in(url: str, token: str, project: str) -> None:
    """Store a token for a project of a server and keep those for other projects. The caller has checked the token."""
    known = login_of(url)
    make_folder(_path().parent)
    _keep(url, Login({**known.tokens, project: token}, project))


def log_out(url: str, project: str = "") -> str:
    """Delete the token for a project of a server; return the project, or "" if there was no such token.

    Args:
        project: if it is "", the default project of commands is used.

    Raises:
        InputError: there are several tokens, and no default project.
    """
    known = login_of(url)
    left = dict(known.tokens)
    project = project or known.project
    if not project and left:
        raise InputError(f"logout: you are logged in to {' and '.join(left)} there; name one project: --project NAME")
    if left.pop(project, None) is None:
        return ""
    _keep(url, Login(left, "" if known.chosen == project else known.chosen))
    return project


def servers() -> list[str]:
    """Return the servers to which this user is logged in."""
    return sorted(_logins())


def project_of(transport: Transport, wanted: str) -> str:
    """Return the project to log in to with a transport's token: `wanted`, or else a project of the token.

    Raises:
        AccessError: the token is not for the project `wanted`.
    """
    try:
        of = json.loads(transport.ask("GET", "/v1/token").body)["projects"]
    except NotFoundError:  # a server with an older version of Posttrain
        return wanted or DEFAULT_PROJECT
    if wanted and wanted not in of:
        own = next(iter(of), DEFAULT_PROJECT)
        raise AccessError(
            f"this token is for {', '.join(of) or 'no project'}, not for {wanted!r}; use a token for that project, or "
            f"posttrain login {transport.url} --project {own}"
        )
    return wanted or (DEFAULT_PROJECT if DEFAULT_PROJECT in of else next(iter(of), DEFAULT_PROJECT))


def _keep(url: str, login: Login) -> None:
    others = {place: kept for place, kept in _logins().items() if place != url.rstrip("/")}
    here = {url.rstrip("/"): {"project": login.chosen, "tokens": dict(login.tokens)}} if login.tokens else {}
    write_json(_path(), others | here)


def _login(kept: Any) -> Login:
    """Read a server's entry in the file; an older version of Posttrain wrote one token and its project."""
    if not isinstance(kept, dict):
        return Login({})
    chosen = str(kept.get("project") or "")
    if "token" in kept:
        return Login({chosen or DEFAULT_PROJECT: str(kept["token"])}, chosen or DEFAULT_PROJECT)
    found = kept.get("tokens")
    return (
        Login({str(name): str(token) for name, token in found.items()}, chosen)
        if isinstance(found, dict)
        else Login({})
    )


def _path() -> Path:
    named = os.environ.get(CONFIG_VARIABLE)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "posttrain"
    return (Path(named) if named else home) / _FILE


def _logins() -> dict[str, dict[str, Any]]:
    path = _path()
    if path.exists() and path.stat().st_mode & _OTHERS:
        raise WorkspaceError(f"{path}: contains tokens, and other users can read it; run chmod 600 {path}")
    found = read_json(path)
    return dict(found) if isinstance(found, dict) else {}
