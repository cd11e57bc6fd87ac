"""The column types of the ledger."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import BigInteger, Dialect, Integer, MetaData, Text, TypeDecorator

from posttrain.domain.errors import IntegrityError


class UnreadableColumnError(IntegrityError, ValueError):
    """A column that holds JSON was altered, and cannot be read."""


class JsonText(TypeDecorator[Any]):
    """A JSON value as text.

    Not the databases' own JSON types: those differ from each other, and PostgreSQL's refuses the NaN that a diverged
    stage reports.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return read_json_text(value)


def read_json_text(value: str | None) -> Any:
    """The value of a column of `JsonText`.

    Raises:
        UnreadableColumnError: it is not JSON.
    """
    if value == "{}":  # of most rows
        return {}
    try:
        return None if value is None else json.loads(value)
    except ValueError as error:
        raise UnreadableColumnError(
            f"the ledger holds {value!r:.40} where JSON was written: a row was altered; posttrain doctor says which"
        ) from error


Counter = BigInteger().with_variant(Integer(), "sqlite")  # SQLite counts only in a column declared INTEGER
metadata = MetaData()
