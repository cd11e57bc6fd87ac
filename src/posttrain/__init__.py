"""Posttrain: declare a post-training run once; train, judge, ship, roll back.

    import posttrain

    run = posttrain.submit("run.yaml")
    run.wait()
    posttrain.channel("prod").rollback()

Names are loaded when first used (PEP 562), so that an engine process does not load the database and the control side
does not load the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posttrain._version import __version__

if TYPE_CHECKING:
    from posttrain.api.handles import Channel, Run
    from posttrain.app.handles import channel, connect, plan, run, submit
    from posttrain.app.workspace import Workspace, init_workspace, open_workspace
    from posttrain.domain.errors import PosttrainError

_ROOMS = {
    "Channel": "posttrain.api.handles",
    "PosttrainError": "posttrain.domain.errors",
    "Run": "posttrain.api.handles",
    "Workspace": "posttrain.app.workspace",
    "channel": "posttrain.app.handles",
    "connect": "posttrain.app.handles",
    "init_workspace": "posttrain.app.workspace",
    "open_workspace": "posttrain.app.workspace",
    "plan": "posttrain.app.handles",
    "run": "posttrain.app.handles",
    "submit": "posttrain.app.handles",
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


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
