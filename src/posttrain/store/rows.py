"""Ledger rows as the frozen values of `domain.records`, and back."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

from sqlalchemy import Result, Row

from posttrain.domain.records import Asset, ChannelRecord, Event
from posttrain.store.journal import CHANGED, TABLES

Record = TypeVar("Record")


def names_of(record: Any) -> tuple[str, ...]:
    """The fields of a record, or of a kind of records."""
    return tuple(record.__dataclass_fields__)


def to_record(kind: type[Record], row: Row[*tuple[Any, ...]]) -> Record:
    """The row as a `kind`: columns and fields have the same names."""
    found = row._mapping
    values = {name: found[name] for name in names_of(kind)}
    if kind is Asset:
        values["parents"] = tuple(values["parents"])
    if kind is ChannelRecord:
        values["protected"] = bool(values["protected"])
    return kind(**values)


def to_records(kind: type[Record], found: Result[*tuple[Any, ...]]) -> list[Record]:
    """All rows of an answer, as `to_record` each: where the columns stand is looked up once."""
    if kind in (Asset, ChannelRecord):
        return [to_record(kind, row) for row in found]
    columns = list(found.keys())
    picked = operator.itemgetter(*(columns.index(name) for name in names_of(kind)))
    return [kind(*picked(row)) for row in found]


def to_event(row: Row[*tuple[Any, ...]]) -> Event:
    """An envelope with its words, place and actor's name, as readers know it: what changed is `payload["changes"]`."""
    values = dict(row._mapping)
    audited = dict(values["audited"])
    body = values["body"] or {}
    told, words = audited.pop("rows", []), body.get("rows", [])
    if told and told[0][0] == CHANGED:
        changes = {**told[0][3], **(words[0] if words else {})}
        changes.pop("state", None)
        if "generation" in changes:
            audited["generation"] = changes.pop("generation")
        audited["changes"] = changes
    elif told:
        key = zip(TABLES[told[0][1]].key, told[0][2], strict=True)
        audited = {**dict(key), **told[0][3], **(words[0] if words else {}), **audited}
    values |= {"payload": {**audited, **body.get("said", {})}, "leaf": values["leaf"].hex()}
    return Event(**{name: values[name] for name in names_of(Event)})


def to_columns(record: Any) -> dict[str, Any]:
    """The record's fields as column values."""
    return {name: plain(getattr(record, name)) for name in names_of(type(record))}


def plain(value: Any) -> Any:
    """Mappings and tuples as the dictionaries and lists that JSON gives back: equal stays equal on the round trip.

    A job may say anything: NUL, which PostgreSQL refuses in any text, becomes U+FFFD, half a surrogate pair `?`.
    """
    if type(value) is str:
        whole = value if value.isascii() else value.encode("utf-8", "replace").decode()
        return whole.replace("\0", "\ufffd") if "\0" in whole else whole
    if hasattr(value, "items"):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
