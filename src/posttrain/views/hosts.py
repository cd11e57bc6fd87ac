"""Where a job runs that does not run here, in words."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import AttemptRecord
from posttrain.domain.waits import span
from posttrain.store.hosts import Host
from posttrain.workspace.opened import OpenWorkspace


def on_another_host(workspace: OpenWorkspace, attempts: Sequence[AttemptRecord]) -> tuple[str, str] | None:
    """Why a stage is where it is whose live attempt another host has, and what a person would do next.

    Args:
        attempts: of the stage, oldest first.

    Returns:
        None: no other host has it.
    """
    last = attempts[-1] if attempts else None
    if last is None or is_final("attempt", last.state) or not workspace.jobs.elsewhere(last) or not workspace.hosts:
        return None
    host = next((one for one in workspace.hosts.all() if one.id == last.host), None)
    if host is not None and not host.gone:
        return f"attempt {last.number} is on host {named(host)}", "none needed"
    silent = f"was last heard of {span(host.silent)} ago" if host else "was never heard of"
    return (
        f"host {named(host) if host else last.host}, which has attempt {last.number}, {silent}",
        f"start its server again; if it is gone for good: posttrain dead {last.run_id}/{last.stage} --assume-dead",
    )


def named(host: Host) -> str:
    """`HOSTNAME:FOLDER (URL)`."""
    return f"{host.name} ({host.url})" if host.url else host.name
