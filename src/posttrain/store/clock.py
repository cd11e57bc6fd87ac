"""The real clock behind the `Clock` port.

The present, as a ledger's rows know it: the database's own on PostgreSQL, whose hosts need not agree on one.
"""

from __future__ import annotations

import time

from sqlalchemy import ColumnElement, Connection, Float, cast, func, literal

from posttrain.domain.ports import Clock

SERVER_TIME: ColumnElement[float] = cast(func.extract("epoch", func.clock_timestamp()), Float(53))


class SystemClock:
    """Wall-clock time of this machine."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


def moment(connection: Connection, clock: Clock) -> dict[str, float]:
    """The time that a prepared statement takes; empty: it asks the server."""
    server = connection.dialect.name == "postgresql" and isinstance(clock, SystemClock)
    return {} if server else {"moment": clock.now()}


def now_in(connection: Connection, clock: Clock) -> ColumnElement[float]:
    """Seconds since the epoch, as a part of a statement."""
    found = moment(connection, clock)
    return literal(found["moment"]) if found else SERVER_TIME
