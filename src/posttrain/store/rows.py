"""Ledger rows as the frozen values of `domain.records`, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Row

from posttrain.domain.records import Asset

Record = TypeVar("Record")


def _names(record: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record))


def to_record(kind: type[Record], row: Row[*tuple[Any, ...]]) -> Record:
    """The row as a `kind`: columns and fields have the same names."""
    values = {name: row._mapping[name] for name in _names(kind)}
    if kind is Asset:
        values["parents"] = tuple(values["parents"])
    return kind(**values)


def to_columns(record: Any) -> dict[str, Any]:
    """The record's fields as column values."""
    return {name: _plain(getattr(record, name)) for name in _names(type(record))}


def _plain(value: Any) -> Any:
    """Mappings and tuples as the dictionaries and lists that JSON gives back: equal stays equal on the round trip."""
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
