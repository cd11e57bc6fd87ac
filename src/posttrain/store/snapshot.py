"""Reads of the ledger as of one moment, and the error for a run that does not exist.

All reads of one `Snapshot` are of one moment. The statement that reads a run is built once, because building it costs
more than running it.

The error for an unknown run suggests an object of another kind with the given name, similar names, or the newest runs.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Float,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
    type_coerce,
)

from posttrain.domain.errors import InputError, NotFoundError, meant
from posttrain.domain.kinds import OWN
from posttrain.domain.lifecycle import AttemptState, RunState, is_final
from posttrain.domain.records import (
    Artifact,
    Asset,
    AssetStatus,
    AttemptRecord,
    Edge,
    Event,
    Hold,
    ReleaseEntry,
    RunNote,
    RunRecord,
    RunRows,
    Signal,
    StageRecord,
    Watch,
)
from posttrain.store.journal import RUN, auditable
from posttrain.store.rows import (
    ApprovalReading,
    ChannelReading,
    PrincipalReading,
    Record,
    SinkReading,
    acted,
    names_of,
    to_event,
    to_record,
)
from posttrain.store.schema import (
    JsonText,
    artifacts,
    asset_status,
    assets,
    attempts,
    edges,
    events,
    holds,
    keyed,
    leaves,
    notes,
    payloads,
    read_json_text,
    runs,
    signals,
    stage_cache,
    stages,
    tree_head,
    unsealed,
    watches,
    work,
)
from posttrain.store.scope import across, of_project

_CHANNEL = "channel:"
_SEARCHED = 1000  # number of newest runs searched for similar names
_LISTED = 3
_SHOWN = 5  # candidates named in an error
_ENDED = [state for state in RunState if is_final("run", state)]
_OVER = [state for state in AttemptState if is_final("attempt", state)]
_DRIVEN = (work.c.project == runs.c.project) & (work.c.kind == RUN) & (work.c.object == runs.c.id)
_RUN_ID: ColumnElement[str] = bindparam("run_id")
_PROJECT: BindParameter[str] = bindparam("of_project")
_STAGES = select(stages).where(of_project(stages, _PROJECT)).order_by(stages.c.run_id, stages.c.position, stages.c.name)
_STAGES_OF_ONE = _STAGES.where(stages.c.run_id == _RUN_ID)
_NOTHING = literal({}, JsonText)
_TRAINS = [name for name, kind in OWN.items() if not (kind.measures or kind.judges)]
_IN_BRIEF = select(
    *(column for column in stages.c if column.name not in ("inputs", "outputs", "metrics")),
    *(_NOTHING.label("inputs"), _NOTHING.label("outputs")),
    type_coerce(case((stages.c.kind.in_(_TRAINS), "{}"), else_=stages.c.metrics), JsonText).label("metrics"),
)
_IN_BRIEF = _IN_BRIEF.where(of_project(stages, _PROJECT)).order_by(stages.c.run_id, stages.c.position, stages.c.name)
_ATTEMPTS_OF_MANY = select(attempts).where(of_project(attempts, _PROJECT))
_ATTEMPTS_OF_MANY = _ATTEMPTS_OF_MANY.order_by(attempts.c.run_id, attempts.c.stage, attempts.c.number)
_ATTEMPTS = _ATTEMPTS_OF_MANY.where(attempts.c.run_id == _RUN_ID)
_ANSWERS = (stages.c.run_id == stage_cache.c.run_id) & (stages.c.name == stage_cache.c.stage)
_ANSWERS &= (stage_cache.c.cache_key == stages.c.cache_key) & (stage_cache.c.project == runs.c.project)
_OF_KEY = (stages.c.cache_key == bindparam("of_key")) & (runs.c.project == _PROJECT)
_BY_KEY = select(stages).join(runs, runs.c.id == stages.c.run_id).where(_OF_KEY)
_BY_KEY = _BY_KEY.order_by(runs.c.created_at.desc(), runs.c.id, stages.c.position)
_ENTRY = stage_cache.alias("entry")
_ANSWERED = _BY_KEY.add_columns(stage_cache.c.stage.label("answers")).outerjoin(stage_cache, _ANSWERS)
_ANSWERED = _ANSWERED.where(  # if the cache has the key, only the cached stage, not stages that reused its outputs
    or_(
        stage_cache.c.stage.is_not(None),
        ~exists().where(_ENTRY.c.project == _PROJECT, _ENTRY.c.cache_key == bindparam("of_key")),
    )
)


def no_run(now: Snapshot, word: str) -> str:
    """Return the message for an unknown run: one line with a next action."""
    names = [record.name for record in now.channel_records()]
    channel, _, number = word.removeprefix(_CHANNEL).partition("@")
    if channel in names:
        return f"there is no run {word!r}: {_of_channel(channel, number, now.history(channel), now.channel(channel))}"
    newest = now.runs(limit=_SEARCHED)
    known = {name for run in newest for name in (run.id, run.name)}
    whole, of_a_stage, _ = word.partition("/")
    if of_a_stage and whole in known:
        hint = f" ({whole!r} is a run, and its stages are shown with it)"
    else:
        listed = ", ".join(run.id for run in newest[:_LISTED])
        hint = meant(word, known) or (f" (the newest: {listed})" if listed else " (there are no runs yet)")
    return f"there is no run {word!r}{hint}; `posttrain ls` shows the runs"


def _of_channel(channel: str, number: str, history: Sequence[ReleaseEntry], live: ReleaseEntry | None) -> str:
    """Return the hint for a user who named a channel, or a channel's release, instead of a run."""
    see = f"posttrain get {channel}"
    if live is None:
        return f"{channel} is a channel without a release; see {see}"
    if not number:
        return f"{channel} is a channel, which points at release {live.sequence}{_made(live)}; see {see}"
    entry = next((one for one in history if str(one.sequence) == number), None)
    if entry is None:
        first, last = history[0].sequence, history[-1].sequence
        has = f"releases {first} to {last}" if first < last else f"release {first}"
        return f"channel {channel} has no release {number}, only {has}; see {see}"
    return f"that is release {number} of channel {channel}{_made(entry)}; see {see}"


def _made(entry: ReleaseEntry) -> str:
    return f", made by run {entry.run_id}: name that run" if entry.run_id else ", which no run made"


_TEXTS = {  # the columns of `rows_on` that are JSON
    kind: [column.key for column in table.c if isinstance(column.type, JsonText)]
    for kind, table in (("StageRecord", stages), ("AttemptRecord", attempts))
}


_WATCHES = select(watches).where(of_project(watches, _PROJECT), watches.c.run_id == _RUN_ID).order_by(watches.c.attempt)


_ASSETS = acted(assets, called="created_by")
_ARTIFACTS = select(artifacts, artifacts.c["class"].label("kind"))


class Snapshot(ApprovalReading, ChannelReading, PrincipalReading, SinkReading):
    """Reads of one project over one connection.

    Inside a `Transaction` the reads include the rows that the transaction has written. Rows of other projects are
    invisible, except to reads over every project.
    """

    def run(self, run_id: str) -> RunRecord:
        """Return the run with exactly this id.

        Raises:
            NotFoundError: there is no such run.
        """
        query, values = _run_on(self._connection.dialect.name), {"run_id": run_id, **self._here()}
        row = self._connection.execute(query, values).one_or_none()
        if row is None:
            raise NotFoundError(f"there is no run {run_id}; `posttrain ls` shows the runs")
        return to_record(RunRecord, row)

    def rows_of(self, run_id: str) -> RunRows:
        """Return a run with its stages, attempts and watches, in one statement.

        Raises:
            NotFoundError: there is no such run.
        """
        return self.rows_in(run_id, rows_on(self._connection.dialect.name))[0]

    def rows_in(
        self, run_id: str, query: Select[Any], values: Mapping[str, Any] | None = None
    ) -> tuple[RunRows, Sequence[Row[*tuple[Any, ...]]]]:
        """Return a run's rows and the raw result of `query`, which is `rows_on`, possibly with added columns.

        Raises:
            NotFoundError: there is no such run.
        """
        found = self._connection.execute(query, {"run_id": run_id, **self._here(), **(values or {})}).all()
        if not found:
            raise NotFoundError(f"there is no run {run_id}; `posttrain ls` shows the runs")
        tries = sorted(_of_kind(AttemptRecord, found), key=lambda one: (one.stage, one.number))
        run, below, seen = (_of_kind(RunRecord, found)[0], _of_kind(StageRecord, found), _of_kind(Watch, found))
        head = (found[0]._mapping["Head.size"], found[0]._mapping["Head.root"])
        return RunRows(run, tuple(below), tuple(tries), tuple(seen), head), found

    def runs(
        self,
        limit: int | None = None,
        state: str | None = None,
        manifest_digest: str | None = None,
        before: str | None = None,
        tag: str | None = None,
    ) -> list[RunRecord]:
        """Return runs, newest first; runs of one manifest are ordered by repetition, the last first.

        Args:
            before: id of a run; only runs that follow it in this order are returned.
            tag: only runs with this tag.

        Raises:
            NotFoundError: `before` is not a run.
        """
        query = _runs_on(self._connection.dialect.name).limit(limit)
        if tag is not None:
            tagged = select(notes.c.run_id).where(notes.c.project == self._project, notes.c.tag == tag)
            query = query.where(runs.c.id.in_(tagged))
        query = query.order_by(runs.c.created_at.desc(), runs.c.repeat.desc(), runs.c.id.desc())
        if before is not None:
            at = self.run(before)
            query = query.where(tuple_(runs.c.created_at, runs.c.repeat, runs.c.id) < (at.created_at, at.repeat, at.id))
        if state is not None:
            query = query.where(runs.c.state == state)
        if manifest_digest is not None:
            query = query.where(runs.c.manifest_digest == manifest_digest).order_by(None).order_by(runs.c.repeat.desc())
        return self._all(RunRecord, query, self._here())

    def find_run(self, words: str) -> RunRecord:
        """Return the run with this id, else the newest run with this name, else the only run with this id prefix.

        Raises:
            NotFoundError: no run matches.
            InputError: several ids have this prefix; the message lists them.
        """
        newest = _runs_on(self._connection.dialect.name)
        newest = newest.order_by(runs.c.created_at.desc(), runs.c.repeat.desc(), runs.c.id.desc())
        exact = self._all(RunRecord, newest.where(or_(runs.c.id == words, runs.c.name == words)), self._here())
        if exact:
            return next((run for run in exact if run.id == words), exact[0])
        starts = func.substr(runs.c.id, 1, len(words)) == words  # LIKE would fold case and read % as a wildcard
        found = self._all(RunRecord, newest.where(starts).limit(_SHOWN + 1), self._here()) if words else []
        if not found:
            raise NotFoundError(no_run(self, words))
        if len(found) > 1:
            listed = ", ".join(f"{run.id} ({run.name})" for run in found[:_SHOWN])
            more = ", …" if len(found) > _SHOWN else ""
            raise InputError(f"run {words!r} is ambiguous: {listed}{more}; give more of the id")
        return found[0]

    def stages(self, *run_ids: str) -> list[StageRecord]:
        """Return the stages of runs of this project, by run, then position."""
        if len(run_ids) == 1:
            return self._all(StageRecord, _STAGES_OF_ONE, {"run_id": run_ids[0], "of_project": self._project})
        return self._each(StageRecord, _STAGES, stages.c.run_id, run_ids, {"of_project": self._project})

    def stages_in_brief(self, *run_ids: str) -> list[StageRecord]:
        """Return stages without inputs and outputs, and with metrics only for gates and evaluations."""
        return self._each(StageRecord, _IN_BRIEF, stages.c.run_id, run_ids, {"of_project": self._project})

    def attempts(self, run_id: str, stage: str | None = None) -> list[AttemptRecord]:
        """Return the attempts of a run, or of one of its stages, oldest first."""
        query = _ATTEMPTS if stage is None else _ATTEMPTS.where(attempts.c.stage == stage)
        return self._all(AttemptRecord, query, {"run_id": run_id, "of_project": self._project})

    def attempts_of(self, *run_ids: str, live: bool = False) -> list[AttemptRecord]:
        """Return the attempts of runs, by run, stage and number; `live`: only attempts that have not ended."""
        query = _ATTEMPTS_OF_MANY.where(attempts.c.state.not_in(_OVER)) if live else _ATTEMPTS_OF_MANY
        return self._each(AttemptRecord, query, attempts.c.run_id, run_ids, {"of_project": self._project})

    def occupying(self, host: str | None, now: float, executors: Sequence[str]) -> tuple[int, list[AttemptRecord]]:
        """Return this host's attempts on these executors that have not ended, in every project.

        The result is the number of attempts in runs with a driver, and the attempts of the other runs.
        """
        here = attempts.c.host.is_(None) if host is None else attempts.c.host == host
        live = and_(here, attempts.c.executor.in_(executors), attempts.c.state.not_in(_OVER))
        mine = (work.c.project == runs.c.project) & (work.c.object == runs.c.id)
        driven = exists().where(mine, work.c.kind == RUN, work.c.lease_until > now)
        of_runs = attempts.join(runs, runs.c.id == attempts.c.run_id)
        counts = select(func.count(), func.count().filter(driven)).select_from(of_runs).where(live)
        why = "slots are counted for the whole host"
        every, held = self._connection.execute(across(counts, why)).one()
        left = across(select(attempts).select_from(of_runs).where(live, ~driven), why)
        return held, self._all(AttemptRecord, left) if held < every else []

    def live_attempts(self) -> set[str]:
        """Return the names of attempts that have not ended, in every project."""
        live = select(attempts.c.name).where(attempts.c.state.not_in(_OVER))
        return set(self._connection.execute(across(live, "scratch folders of every project")).scalars())

    def asset(self, kind: str, name: str, version: int | None = None) -> Asset:
        """Return one version of an asset; without `version`, the latest.

        Raises:
            NotFoundError: the name or version does not exist; the message lists existing names or versions.
        """
        versions = self.assets(kind, name)
        if not versions:
            known = sorted({asset.name for asset in self.assets(kind)})
            listed = f"known: {', '.join(known[:_SHOWN])}" if known else f"there is no {kind} yet"
            raise NotFoundError(f"there is no {kind}:{name}; {listed}; `posttrain asset ls` shows them")
        if version is None:
            return versions[-1]
        for asset in versions:
            if asset.version == version:
                return asset
        raise NotFoundError(f"there is no {kind}:{name}@{version}; versions are 1 to {versions[-1].version}")

    def latest_asset(self, kind: str, name: str) -> Asset | None:
        """Return the newest version with this name; None if there is no version."""
        return self._one(
            Asset,
            self._assets()
            .where(assets.c.kind == kind, assets.c.name == name)
            .order_by(assets.c.version.desc())
            .limit(1),
        )

    def assets(self, kind: str | None = None, name: str | None = None) -> list[Asset]:
        """Return assets, in the order of kind, name and version."""
        wanted = {column: value for column, value in (("kind", kind), ("name", name)) if value is not None}
        return self._all(
            Asset,
            self._assets().where(*keyed(assets, **wanted)).order_by(assets.c.kind, assets.c.name, assets.c.version),
        )

    def assets_by_digest(self, *digests: str) -> list[Asset]:
        """Return every asset version with these bytes."""
        return self._each(
            Asset, self._assets().order_by(assets.c.kind, assets.c.name, assets.c.version), assets.c.digest, digests
        )

    def alike(self, *wanted: Asset) -> list[Asset]:
        """Return versions that share kind and digest with one of these, and the latest version of each name."""
        other = assets.alias()
        mine = (other.c.project == assets.c.project, other.c.kind == assets.c.kind, other.c.name == assets.c.name)
        latest = select(func.max(other.c.version)).where(*mine).scalar_subquery()
        same = assets.c.digest.in_([one.digest for one in wanted])
        named = and_(assets.c.name.in_([one.name for one in wanted]), assets.c.version == latest)
        return self._all(Asset, self._assets().where(assets.c.kind == wanted[0].kind, or_(same, named)))

    def asset_status(self, status: str | None = None) -> list[tuple[AssetStatus, str]]:
        """Return the statuses of versions, each with the digest of its bytes, by kind, name and version.

        Args:
            status: only this status; None: every status that is not empty.
        """
        same = [assets.c[name] == asset_status.c[name] for name in ("project", "kind", "name", "version")]
        wanted = asset_status.c.status == status if status else asset_status.c.status != ""
        query = acted(asset_status, assets.c.digest).join(assets, and_(*same))
        query = query.where(asset_status.c.project == self._project, wanted)
        return [
            (to_record(AssetStatus, row), row.digest)
            for row in self._connection.execute(
                query.order_by(asset_status.c.kind, asset_status.c.name, asset_status.c.version)
            )
        ]

    def artifacts(self, *digests: str) -> list[Artifact]:
        """Return the artifacts of these digests; unknown digests are left out."""
        return self._each(Artifact, _ARTIFACTS.where(artifacts.c.project == self._project), artifacts.c.digest, digests)

    def find_artifact(self, prefix: str) -> Artifact:
        """Return the artifact with this digest prefix.

        Raises:
            NotFoundError: no digest has this prefix.
            InputError: several digests have this prefix.
        """
        begins = func.substr(artifacts.c.digest, 1, len(prefix)) == prefix
        found = self._all(Artifact, _ARTIFACTS.where(artifacts.c.project == self._project, begins).limit(2))
        if not found:
            raise NotFoundError(f"there is no artifact {prefix!r}; `posttrain asset ls` and `get` show digests")
        if len(found) > 1:
            raise InputError(f"digest {prefix!r} is ambiguous; give more of it")
        return found[0]

    def used(self, *consumers: str) -> list[Edge]:
        """Return the edges into stages, assets, releases or runs, in the order of consumers, then slots."""
        return self._edges(edges.c.consumer, consumers)

    def made(self, *producers: str) -> list[Edge]:
        """Return the outputs of stages or assets, used or not."""
        return self._edges(edges.c.producer, producers, edges.c.consumer == "")

    def uses(self, *producers: str) -> list[Edge]:
        """Return the uses of outputs of these producers."""
        return self._edges(edges.c.producer, producers, edges.c.consumer != "")

    def uses_of_bytes(self, *digests: str) -> list[Edge]:
        """Return the uses of these bytes, under any name."""
        return self._edges(edges.c.digest, digests, edges.c.consumer != "")

    def holds(self, digest: str) -> list[Hold]:
        """Return the holds of these bytes, oldest first."""
        mine = (holds.c.project == self._project, holds.c.digest == digest, holds.c.released_at.is_(None))
        return self._all(Hold, select(holds).where(*mine).order_by(holds.c.at, holds.c.holder))

    def _edges(self, column: ColumnElement[Any], names: Sequence[str], *where: ColumnElement[bool]) -> list[Edge]:
        found = self._each(Edge, select(edges).where(edges.c.project == self._project, *where), column, names)
        return sorted(found, key=lambda edge: (edge.consumer, edge.slot, edge.producer, edge.output, edge.digest))

    def events_about(self, subject: str, kind: str) -> list[Event]:
        """Return the events of one kind with exactly this subject (a channel, a run), oldest first, sealed or not."""
        return self._told(self._events().where(*keyed(events, subject=subject, kind=kind)).order_by(events.c.id))

    def signals(self, *run_ids: str) -> list[Signal]:
        """Return the signals sent to runs, oldest first."""
        query = acted(signals).where(signals.c.project == self._project)
        return self._each(Signal, query.order_by(signals.c.at, signals.c.name), signals.c.run_id, run_ids)

    def notes(self, *run_ids: str, tags: bool = False) -> list[RunNote]:
        """Return the notes and tags of runs, oldest first; `tags`: only tags."""
        query = acted(notes).where(notes.c.project == self._project, *([notes.c.tag != ""] if tags else ()))
        return self._each(RunNote, query.order_by(notes.c.run_id, notes.c.number), notes.c.run_id, run_ids)

    def watches(self, run_id: str) -> list[Watch]:
        """Return the watches of a run: how long its jobs have been silent."""
        return self._all(Watch, _WATCHES, {"run_id": run_id, "of_project": self._project})

    def stages_by_key(self, cache_key: str) -> list[StageRecord]:
        """Return every stage with this cache key; newest run first."""
        return self._all(StageRecord, _BY_KEY, {"of_key": cache_key, "of_project": self._project})

    def runs_that_wait_for(self, cache_key: str) -> set[str]:
        """Return the ids of unfinished runs in which a ready, unstarted stage has this cache key."""
        ready = keyed(stages, cache_key=cache_key, state="ready")
        query = select(stages.c.run_id).join(runs, runs.c.id == stages.c.run_id).where(*ready)
        query = query.where(runs.c.project == self._project, runs.c.state.not_in(_ENDED))
        return set(self._connection.execute(query).scalars())

    def cached_stage(self, cache_key: str) -> StageRecord | None:
        """Return the cached stage for this key; None if there is no such stage, or the log contradicts the cache.

        The caller must check that the stage's blobs still exist.
        """
        return self.computed(cache_key)[0]

    def computed(self, cache_key: str) -> tuple[StageRecord | None, list[StageRecord]]:
        """Return `cached_stage` and, if the cache lacks the key, `stages_by_key`, in one statement."""
        found = self._connection.execute(_ANSWERED, {"of_key": cache_key, "of_project": self._project}).all()
        same = [to_record(StageRecord, row) for row in found]
        if not (found and found[0]._mapping["answers"]):
            return None, same
        return (same[0], []) if self._logged(cache_key, same[0]) else (None, self.stages_by_key(cache_key))

    def _logged(self, cache_key: str, stage: StageRecord) -> bool:
        """Return whether events recorded this stage for this key, with the outputs in its row."""
        query = select(type_coerce(events.c.audited, Text)).where(events.c.project == self._project)
        query = query.where(events.c.subject == f"{stage.run_id}/{stage.name}").order_by(events.c.id)
        answers, made = (stage_cache.name, (self._project, cache_key)), (stages.name, (stage.run_id, stage.name))
        told: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {answers: {}, made: {}}
        for audited in self._connection.execute(query).scalars():
            for _, table, key, row in json.loads(audited).get("rows", ()):
                told.get((table, tuple(key)), {}).update(row)
        named = {"run_id": stage.run_id, "stage": stage.name}
        return told[answers] == named and told[made].get("outputs", {}) == auditable(stage.outputs)

    def events(self, after: int = 0, subject_prefix: str | None = None, limit: int = 1000) -> list[Event]:
        """Return sealed events with `sequence > after`, in order, without gaps.

        Args:
            subject_prefix: a subject and everything below it: `run1` selects `run1`, `run1/train` and `run1/train/2`,
                but not `run10`.
        """
        query = self._events().where(leaves.c.sequence > after).order_by(leaves.c.sequence).limit(limit)
        return self._told(query.where(*_below(subject_prefix)))

    def last_said(self, *subjects: str) -> dict[str, float]:
        """Return the time of the newest event of each of these subjects (exact matches only), in one statement."""
        if not subjects:
            return {}
        query = self.scope.select(events, events.c.subject, func.max(events.c.at)).group_by(events.c.subject)
        return {
            subject: float(at) for subject, at in self._connection.execute(query.where(events.c.subject.in_(subjects)))
        }

    def pending_events(self, subject_prefix: str | None = None, limit: int = 1000) -> list[Event]:
        """Return committed events that are not sealed, in id order; they have no `sequence`."""
        query = self._events().join(unsealed, unsealed.c.event == events.c.id).order_by(events.c.id).limit(limit)
        return self._told(query.where(*_below(subject_prefix)))

    def has_request(self, request: str) -> bool:
        """Return whether a transaction with this request id was committed."""
        query = self.scope.select(events, events.c.id).where(events.c.request == request).limit(1)
        return self._connection.execute(query).first() is not None

    def _here(self) -> dict[str, Any]:
        """Return the parameters of `_runs_on`, which converts leases from PostgreSQL's to this process's clock."""
        mine: dict[str, Any] = {"of_project": self._project}
        return {**mine, "here": time.time()} if self._connection.dialect.name == "postgresql" else mine

    def _assets(self) -> Select[Any]:
        return _ASSETS.where(assets.c.project == self._project)

    def _events(self) -> Select[Any]:
        query = acted(events, leaves.c.sequence, payloads.c.body).outerjoin(leaves, leaves.c.event == events.c.id)
        return query.outerjoin(payloads, payloads.c.event == events.c.id).where(events.c.project == self._project)

    def _told(self, query: Select[Any]) -> list[Event]:
        return [to_event(row) for row in self._connection.execute(query)]


@functools.cache
def _runs_on(dialect: str) -> Select[Any]:
    """Return the query for runs with their leases."""
    until: ColumnElement[Any] = work.c.lease_until
    if dialect == "postgresql":
        until = (
            until - cast(func.extract("epoch", func.clock_timestamp()), Float(53)) + bindparam("here", type_=Float(53))
        )
    leased = select(runs, work.c.lease_owner, until.label("lease_expires")).outerjoin(work, _DRIVEN)
    return leased.where(runs.c.project == _PROJECT)


@functools.cache
def _run_on(dialect: str) -> Select[Any]:
    return _runs_on(dialect).where(runs.c.id == _RUN_ID)


@functools.cache
def rows_on(dialect: str) -> Select[Any]:
    """Return the query for a run's rows, one per attempt: `KIND.COLUMN` of run, stage, attempt, watch and log head.

    The query returns JSON columns as text: a stage's JSON is in the row of each of its attempts, but is parsed once.
    """
    run = _run_on(dialect)
    columns = [column.label(f"RunRecord.{column.key}") for column in run.selected_columns]
    for kind, table in (("StageRecord", stages), ("AttemptRecord", attempts), ("Watch", watches)):
        texts = [type_coerce(column, Text) if isinstance(column.type, JsonText) else column for column in table.c]
        columns += [text.label(f"{kind}.{column.key}") for text, column in zip(texts, table.c, strict=True)]
    columns += [
        select(column).scalar_subquery().label(f"Head.{column.key}") for column in (tree_head.c.size, tree_head.c.root)
    ]
    query = run.with_only_columns(*columns).outerjoin(stages, stages.c.run_id == runs.c.id)
    tries = (attempts.c.run_id == runs.c.id) & (attempts.c.stage == stages.c.name)
    seen = (watches.c.run_id == runs.c.id) & (watches.c.attempt == attempts.c.name)
    query = query.outerjoin(attempts, tries).outerjoin(watches, seen)
    return query.order_by(stages.c.position, stages.c.name, attempts.c.number)


def _of_kind(kind: type[Record], rows: Sequence[Row[*tuple[Any, ...]]]) -> list[Record]:
    """Return the records of one kind in the result of `rows_on`, each once."""
    columns = [(name, f"{kind.__name__}.{name}") for name in names_of(kind)]
    texts = _TEXTS.get(kind.__name__, ())
    key = [label for name, label in columns if name in ("id", "run_id", "name", "attempt")]
    found: dict[tuple[Any, ...], Record] = {}
    for row in rows:
        values = row._mapping
        here = tuple(values[label] for label in key)
        if here not in found and None not in here:
            fields = {name: values[label] for name, label in columns}
            found[here] = kind(**fields | {name: read_json_text(fields[name]) for name in texts})
    return list(found.values())


def _below(prefix: str | None) -> list[ColumnElement[bool]]:
    if prefix is None:
        return []
    return [or_(events.c.subject == prefix, func.substr(events.c.subject, 1, len(prefix) + 1) == f"{prefix}/")]
