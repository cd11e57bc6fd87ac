"""How a failure on a rank reaches the controller: as itself, with role, rank and its own traceback."""

from __future__ import annotations

from typing import ClassVar

from posttrain.domain.errors import FailureClass, InfrastructureError, JobFailedError
from posttrain.engine.groups.port import Process


class WorkerLostError(InfrastructureError):
    """A worker's process is gone, or its group can no longer be used; a retry starts anew from a checkpoint.

    Args:
        process: that is gone, where the other ranks of its pool go on; None: the pool cannot be used any longer.
    """

    def __init__(self, message: str, process: Process | None = None) -> None:
        super().__init__(message)
        self.process = process


class WorkerError(JobFailedError):
    """A worker raised something that cannot travel between processes; its text and traceback are all there is."""

    failure_class: ClassVar[FailureClass] = FailureClass.BUG


class RemoteTraceback(Exception):  # noqa: N818  # it is a cause to print, not an error to catch
    """The traceback of a worker in another process, as text: the `__cause__` of what the controller raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'
