"""Artifacts, edges and holds: written in the transaction that creates them, and recorded in its event.

A row that already exists is not a change. No method queries row by row: every write is one statement.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Insert, Table, delete, select, update

from posttrain.domain.canonical import is_digest
from posttrain.domain.kinds import BEST, MODEL, REPORT
from posttrain.domain.records import (
    IMPORT,
    IMPORTED,
    MANIFEST,
    ORIGIN,
    PARENT,
    REUSED,
    Artifact,
    Asset,
    Edge,
    ReleaseEntry,
    named,
    release_end,
    run_end,
    source_of,
    stage_end,
)
from posttrain.store.journal import ADDED, CHANGED, REMOVED, Change
from posttrain.store.schema import artifacts, assets, edges, holds, keyed, stages
from posttrain.store.scope import Scope

LIVE = "live"  # the reason of a channel's hold on its model
_AS_MODEL = (MODEL, BEST)  # among outputs with equal bytes, these are preferred, in this order
Sizes = Mapping[str, int]  # digest → bytes


@dataclass(frozen=True, slots=True)
class Told:
    """The changed columns of a stage, with their artifacts and edges."""

    run_id: str
    stage: str
    at: float
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    cached_from: str | None = None  # RUN/STAGE whose outputs are reused
    sizes: Sizes = field(default_factory=dict)  # sizes of the outputs, if known
    taken: Mapping[str, str] = field(default_factory=dict)  # input → name of the producing stage's output, if known
    models: Sequence[Asset] = ()  # versions under which the outputs were registered

    @property
    def end(self) -> str:
        """The stage's name in edges."""
        return stage_end(self.run_id, self.stage)

    def artifacts(self) -> Iterator[Artifact]:
        """Yield the stage's outputs. The submission, the producing stage or the release has recorded the inputs."""
        for _, digest, form in _blobs(self.outputs):
            yield Artifact(digest, form, self.sizes.get(digest), "output", self.at)

    def made(self) -> Iterator[Edge]:
        """Yield the edges of the stage's outputs, and of the stage whose outputs are reused."""
        for output, digest, _ in _blobs(self.outputs):
            yield Edge(self.end, output, "", "", digest)
            if self.cached_from:
                yield Edge(source_of(self.cached_from)[0], output, self.end, REUSED, digest)
        for model in self.models:
            yield from _registered(model)

    def used(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield slot, digest, producer and output of every input; the output is empty if unknown."""
        for slot, digest, _ in _blobs(self.inputs):
            producer, output = source_of(str(self.inputs[slot].get("name", "")))
            yield slot, digest, producer, output or self.taken.get(slot, "")


class EdgeWriter:
    """Writes a project's artifacts, edges and holds in one transaction. Every method returns the changes to record."""

    def __init__(self, connection: Connection, project: str) -> None:
        self._connection, self._project = connection, project
        self._noted: set[str] = set()  # digests

    def run(self, run_id: str, manifest: str, found: Iterable[Artifact], now: float) -> list[Change]:
        """Add a run of a manifest; `found`: the artifacts that the submission put into the store."""
        noted = self.note([*found, Artifact(manifest, "file", None, MANIFEST, now)])
        return noted + self.join([Edge("", "", run_end(run_id), MANIFEST, manifest)])

    def stages(self, *told: Told) -> list[Change]:
        """Add the inputs and outputs that the stages' columns contain."""
        found = [artifact for one in told for artifact in one.artifacts()]
        return self.note(found) + self.join([*(edge for one in told for edge in one.made()), *self._uses(told)])

    def rebind(self, run_id: str, name: str) -> list[Change]:
        """Delete the input edges of a stage that gets new inputs."""
        here = keyed(edges, project=self._project, consumer=stage_end(run_id, name))
        gone = self._connection.execute(delete(edges).where(*here).returning(*edges.c)).mappings()
        return [Change(REMOVED, edges.name, dict(row), {}) for row in gone]

    def asset(self, asset: Asset, sizes: Sizes, now: float) -> list[Change]:
        """Add a registered version: its bytes, its parents, and the run or stage that produced it."""
        record = asset.meta.get(IMPORTED)
        found = [Artifact(asset.digest, asset.form, sizes.get(asset.digest), "asset", now)]
        if record:
            found.append(Artifact(str(record), "file", sizes.get(str(record)), "record", now))
        joined = list(_registered(asset))
        known = self._registered(asset.parents) if asset.parents else {}
        for parent in asset.parents:
            slot = IMPORT if parent == record else PARENT
            there = is_digest(parent)
            joined.append(
                Edge(known.get(parent, "") if there else parent, "", asset.ref, slot, parent if there else "")
            )
        return self.note(found) + self.join(joined)

    def release(self, entry: ReleaseEntry, before: str | None) -> list[Change]:
        """Add a release: its model and report, with the stages of its run that produced them, and the channel's hold.

        Args:
            before: the model at which the channel pointed before.
        """
        end, joined = release_end(entry.channel, entry.sequence), []
        made = self._made_in(entry.run_id) if entry.run_id else []
        for slot, digest in ((MODEL, entry.model_digest), (REPORT, entry.report_digest)):
            makers = [(edge.producer, edge.output) for edge in made if edge.digest == digest] or [("", "")]
            joined += [Edge(*maker, end, slot, digest) for maker in makers if digest]
        noted = self.note([Artifact(entry.model_digest, "tree", None, "output", entry.at)])
        holder = f"channel:{entry.channel}"
        let_go = self._let_go(before, holder, entry.at) if before and before != entry.model_digest else []
        return noted + self.join(joined) + let_go + self._hold(entry.model_digest, holder, entry.at)

    def note(self, found: Iterable[Artifact]) -> list[Change]:
        """Add artifacts, each with the kind of its first occurrence."""
        rows: dict[str, dict[str, Any]] = {}
        for one in (one for one in found if one.digest not in self._noted):
            row = {"form": one.form, "bytes": one.bytes, "class": one.kind, "created_at": one.created_at}
            rows.setdefault(one.digest, {"project": self._project, "digest": one.digest, **row})
        self._noted |= rows.keys()
        return self.add(artifacts, [rows[digest] for digest in sorted(rows)])

    def join(self, found: Sequence[Edge]) -> list[Change]:
        """Add edges."""
        rows = [
            {
                "project": self._project,
                "producer": named(edge.producer),
                "output": edge.output,
                "consumer": named(edge.consumer),
                "slot": named(edge.slot),
                "digest": edge.digest,
            }
            for edge in sorted(set(found), key=lambda edge: (edge.consumer, edge.slot, edge.producer, edge.output))
        ]
        return self.add(edges, rows)

    def add(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> list[Change]:
        """Add rows. Callers pass them in a fixed order, so that two writers of the same rows do not deadlock."""
        if not rows:
            return []
        added = {tuple(row) for row in self._connection.execute(addition(self._connection.dialect.name, table), rows)}
        keys = [{column.name: row[column.name] for column in table.primary_key} for row in rows]
        told = zip(keys, rows, strict=True)
        return [Change(ADDED, table.name, key, row) for key, row in told if tuple(key.values()) in added]

    def _hold(self, digest: str, holder: str, now: float) -> list[Change]:
        key = {"project": self._project, "digest": digest, "holder": holder}
        values = {"reason": LIVE, "at": now, "released_at": None}
        return self.add(holds, [{**key, **values}]) or self._change_hold(key, values)

    def _let_go(self, digest: str, holder: str, now: float) -> list[Change]:
        return self._change_hold({"project": self._project, "digest": digest, "holder": holder}, {"released_at": now})

    def _change_hold(self, key: Mapping[str, Any], values: Mapping[str, Any]) -> list[Change]:
        there = self._connection.execute(update(holds).where(*keyed(holds, **key)).values(**values)).rowcount
        return [Change(CHANGED, holds.name, key, values)] if there else []

    def _uses(self, told: Sequence[Told]) -> Iterator[Edge]:
        """Yield the edges of inputs; if the output of the producing stage is unknown, it is looked up by its bytes."""
        sources = [(one.end, *used) for one in told for used in one.used()]
        asked = {producer for *_, producer, output in sources if producer.startswith("run:") and not output}
        made: dict[tuple[str, str], list[str]] = {}
        for edge in self._made(asked):
            made.setdefault((edge.producer, edge.digest), []).append(edge.output)
        for end, slot, digest, producer, output in sources:
            yield Edge(producer, output or min(made.get((producer, digest), [""]), key=_rank), end, slot, digest)

    def _made_in(self, run_id: str) -> list[Edge]:
        mine = Scope(self._project).select(stages, stages.c.name).where(stages.c.run_id == run_id)
        return self._made({stage_end(run_id, name) for name in self._connection.execute(mine).scalars()})

    def _made(self, producers: Collection[str]) -> list[Edge]:
        if not producers:
            return []
        here = (edges.c.project == self._project, edges.c.consumer == "", edges.c.producer.in_(sorted(producers)))
        return [
            Edge(row.producer, row.output, row.consumer, row.slot, row.digest)
            for row in self._connection.execute(select(edges).where(*here))
        ]

    def _registered(self, digests: Iterable[str]) -> dict[str, str]:
        """Return, by digest, the asset version with these bytes (the first if there are several)."""
        query = (
            select(assets.c.digest, assets.c.kind, assets.c.name, assets.c.version)
            .where(assets.c.project == self._project, assets.c.digest.in_(list(digests)))
            .order_by(assets.c.kind.desc(), assets.c.name.desc(), assets.c.version.desc())
        )
        return {row.digest: f"{row.kind}:{row.name}@{row.version}" for row in self._connection.execute(query)}


def _registered(asset: Asset) -> Iterator[Edge]:
    """Yield the edges of a version's bytes, and of the run or stage that produced the version."""
    yield Edge(asset.ref, "", "", "", asset.digest)
    run, stage = asset.meta.get("run"), asset.meta.get("stage")
    if run:
        end = stage_end(str(run), str(stage)) if stage else run_end(str(run))
        yield Edge(end, str(asset.meta.get("output", "")), asset.ref, ORIGIN, asset.digest)


def _rank(output: str) -> tuple[int, str]:
    return (_AS_MODEL.index(output) if output in _AS_MODEL else len(_AS_MODEL)), output


def _blobs(columns: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, digest and form of every input or output."""
    for name, blob in columns.items():
        digest = blob.get("digest") if isinstance(blob, Mapping) else None
        if isinstance(digest, str) and is_digest(digest):
            yield name, digest, str(blob.get("form", "file"))


@functools.cache
def addition(dialect: str, table: Table) -> Insert:
    """Return the statement that inserts missing rows and returns their keys."""
    from sqlalchemy.dialects import postgresql, sqlite  # only writers load these modules

    statement = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(table)
    return statement.on_conflict_do_nothing().returning(*table.primary_key)
