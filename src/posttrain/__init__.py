"""Posttrain: declare a post-training run once; train, judge, ship, roll back.

    import posttrain

    run = posttrain.submit("run.yaml")
    run.wait()
    posttrain.channel("prod").rollback()

Names are loaded when first used (PEP 562), so that an engine process does not load the database and the control side
does not load the engine. Each function uses a `Control`: the given one, or one over a workspace of this machine.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from posttrain.api.control import Control
    from posttrain.api.handles import Channel, Run
    from posttrain.api.values import PlanView
    from posttrain.app.workspace import Workspace, init_workspace, open_workspace
    from posttrain.domain.errors import PosttrainError
    from posttrain.domain.overrides import Setting

_ROOMS = {
    "Channel": "posttrain.api.handles",
    "PosttrainError": "posttrain.domain.errors",
    "Run": "posttrain.api.handles",
    "Workspace": "posttrain.app.workspace",
    "init_workspace": "posttrain.app.workspace",
    "open_workspace": "posttrain.app.workspace",
}
__all__ = [
    "Channel",
    "PosttrainError",
    "Run",
    "Workspace",
    "__version__",
    "channel",
    "connect",
    "init_workspace",
    "open_workspace",
    "plan",
    "run",
    "submit",
]


def connect(url: str, token: str | None = None, *, project: str | None = None) -> Control:
    """Return a server's `Control`, which the functions below accept as `workspace`.

    Args:
        token: None: the value of POSTTRAIN_TOKEN, or the token of `posttrain login`.
        project: None: the value of POSTTRAIN_PROJECT, or the project of the last login, else `default`.

    Raises:
        InputError: the URL is invalid, or there is no login for the server.
    """
    from posttrain.client.logins import logged_in

    return logged_in(url, project or "", token)


def plan(
    path: str | Path,
    workspace: Workspace | Control | None = None,
    *,
    seed: int | None = None,
    setting: Mapping[str, Any] | Setting = (),
) -> PlanView:
    """Validate a run file, resolve it to a manifest and estimate the cost of its run, without writing anything.

    Args:
        workspace: None: the nearest workspace.
        seed: replaces the seed in the file.
        setting: values that replace those in the file, by path: `{"grpo.steps": 100}`.

    Raises:
        InputError: the run file is invalid; the message names the file, the field, the constraint and the value.
    """
    from posttrain.domain.overrides import setting_of

    return _control(workspace).plan(Path(path), seed=seed, setting=setting_of(setting))


def submit(
    path: str | Path,
    *,
    again: bool = False,
    workspace: Workspace | Control | None = None,
    seed: int | None = None,
    setting: Mapping[str, Any] | Setting = (),
) -> Run:
    """Record a run of a run file or of a locked manifest; if it was submitted before, return the existing run.

    No stage starts until a process drives the run: `run.wait()`, or `posttrain run` in any terminal.

    Raises:
        InputError: the file is invalid (see `plan`), or a seed or a setting was given for a locked manifest.
    """
    from posttrain.api.handles import Run
    from posttrain.domain.overrides import setting_of

    control = _control(workspace)
    made = control.submit(Path(path), again=again, seed=seed, setting=setting_of(setting))
    return Run(control, made.run.id, made.attached, made.warnings)


def run(prefix: str, workspace: Workspace | Control | None = None) -> Run:
    """Return the run whose id is or begins with `prefix`, or the newest run of that name.

    Raises:
        NotFoundError: there is no such run.
        InputError: the ids of several runs begin with the prefix.
    """
    from posttrain.api.handles import Run

    control = _control(workspace)
    return Run(control, control.run(prefix).id, attached=True)


def channel(name: str, workspace: Workspace | Control | None = None) -> Channel:
    """Return a release channel, which need not exist yet."""
    from posttrain.api.handles import Channel

    return Channel(_control(workspace), name)


def _control(given: Workspace | Control | None) -> Control:
    from posttrain.app.control import control_of, open_control

    return open_control() if given is None else control_of(given)


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
