"""Drives a run without a driver's process: passes of a reconciler, by the clock of its stores."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.control.reconciler import Reconciler
from posttrain.domain.lifecycle import is_final
from posttrain.domain.records import RunRecord


def drive(
    reconciler: Reconciler,
    run_id: str,
    interval: float = 0.1,
    timeout: float = 3600.0,
    watch: Callable[[RunRecord], None] = lambda run: None,
) -> RunRecord:
    """Look until the run is final, as `app.driver` does.

    Args:
        timeout: seconds of the clock, which only a hang meets.
    """
    clock = reconciler._stores.clock
    until = clock.now() + timeout
    with reconciler.kept():
        while True:
            tick = reconciler.step(run_id)
            watch(tick.run)
            if is_final("run", tick.run.state):
                return tick.run
            assert clock.now() < until, (tick.run.state, tick.run.message)
            if not tick.changed:
                reconciler.rest(interval)
