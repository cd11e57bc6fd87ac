"""The Python API: plan and submit run files, open runs and channels.

Each function uses a `Control`: the given one, or one over a workspace of this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.api.handles import Channel, Run
from posttrain.app.control import control_of, open_control

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import PlanView
    from posttrain.app.workspace import Workspace
    from posttrain.domain.overrides import Setting


def connect(url: str, token: str | None = None, *, project: str | None = None) -> Control:
    """Return a server's `Control`, for use as `workspace` below.

    Args:
        token: None: POSTTRAIN_TOKEN, or that of `posttrain login`.
        project: None: POSTTRAIN_PROJECT, or that of the last login, else `default`.

    Raises:
        InputError: an invalid URL; there is no login for the server.
    """
    from posttrain.client.logins import logged_in

    return logged_in(url, project or "", token)


def plan(
    path: str | Path, workspace: Workspace | Control | None = None, *, seed: int | None = None, setting: Setting = ()
) -> PlanView:
    """Validate a run file, resolve it to a manifest and estimate its run. Writes nothing.

    Args:
        workspace: None: the nearest one.
        seed: replaces the file's.
        setting: values that replace the file's.

    Raises:
        InputError: naming file, field, constraint and value.
    """
    return _control(workspace).plan(Path(path), seed=seed, setting=setting)


def submit(
    path: str | Path,
    *,
    again: bool = False,
    workspace: Workspace | Control | None = None,
    seed: int | None = None,
    setting: Setting = (),
) -> Run:
    """Record a run of a run file or of a locked manifest; one that was submitted before attaches to its run.

    Nothing computes until a process drives the run: `run.wait()`, or `posttrain run` in any terminal.

    Raises:
        InputError: see `plan`; a seed or a setting for a manifest that is locked already.
    """
    control = _control(workspace)
    made = control.submit(Path(path), again=again, seed=seed, setting=setting)
    return Run(control, made.run.id, made.attached, made.warnings)


def run(prefix: str, workspace: Workspace | Control | None = None) -> Run:
    """Return a run by id, by a prefix of it, or the newest with a name.

    Raises:
        NotFoundError: no such run. InputError: the prefix names several.
    """
    control = _control(workspace)
    return Run(control, control.run(prefix).id, attached=True)


def channel(name: str, workspace: Workspace | Control | None = None) -> Channel:
    """Return a release channel; it need not exist yet."""
    return Channel(_control(workspace), name)


def _control(given: Workspace | Control | None) -> Control:
    return open_control() if given is None else control_of(given)
