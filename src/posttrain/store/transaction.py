"""Writing the ledger: state rows and the events that record them commit together or not at all.

Every update is a compare-and-set on (id, generation): a writer that decided on the basis of an old row gets
`StaleWriteError`, reads again and decides again. Therefore the writes of a driver whose lease has expired fail as soon
as its successor has written.
Events are buffered until the end of the block and written together. A change of a run, or of its rows, schedules the
run in the work queue.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Table, Update, bindparam, delete, func, select, text as sql, update

from posttrain.domain.errors import ConflictError, InputError, StaleWriteError
from posttrain.domain.lifecycle import check_transition, is_final
from posttrain.domain.records import (
    Artifact,
    Asset,
    AssetStatus,
    AttemptRecord,
    RunNote,
    RunRecord,
    Signal,
    StageRecord,
    Watch,
)
from posttrain.store.database import hold_off_others
from posttrain.store.edges import Sizes, Told
from posttrain.store.journal import CHANGED, REMOVED, Change, revive, settle_at
from posttrain.store.rows import Record, plain, to_columns
from posttrain.store.schema import (
    asset_status,
    assets,
    attempts,
    keyed,
    notes,
    projects,
    runs,
    signals,
    stage_cache,
    stages,
)
from posttrain.store.scope import of_project
from posttrain.store.writer import ApprovalWriting, GrantWriting, ReleaseWriting, SinkWriting

_WATCH = sql(
    "INSERT INTO watches (attempt, run_id, progress, quiet, at) VALUES (:attempt, :run_id, :progress, :quiet, :at) "
    "ON CONFLICT (attempt) DO UPDATE SET progress = excluded.progress, quiet = excluded.quiet, at = excluded.at "
    "WHERE watches.run_id = excluded.run_id"
)
_JOINED = frozenset({"lease_owner", "lease_expires"})  # fields of a run that come from its row in the work queue
_RACES = 20  # maximum conflicts with concurrently ending runs that register versions of the same names
_FIXED = _JOINED | {"id", "run_id", "stage", "number", "state", "generation", "created_at", "project", "repeat"}
_KEYS = {"run": ("id",), "stage": ("run_id", "name"), "attempt": ("run_id", "stage", "number")}
_TABLES: Mapping[str, Table] = {"run": runs, "stage": stages, "attempt": attempts}


class Transaction(ReleaseWriting, ApprovalWriting, GrantWriting, SinkWriting):
    """One write transaction of `actor`, open during the `with` block of `Ledger.transaction`."""

    def refuse_repeated(self, request: str) -> None:
        """Reject a request that was already carried out under this id, by a process whose client has disconnected.

        Raises:
            ConflictError: the request was already carried out.
        """
        if self._connection.dialect.name == "postgresql":  # SQLite has one writer at a time
            key = int.from_bytes(bytes.fromhex(request[:16]), "big", signed=True)
            self._connection.execute(sql("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
        if self.snapshot.has_request(request):
            raise ConflictError("the request was carried out already; check the result before you repeat the request")

    def insert_run(self, run: RunRecord, run_stages: Sequence[StageRecord], artifacts: Sequence[Artifact] = ()) -> None:
        """Insert a new run and all its stages.

        Args:
            artifacts: the artifacts that the submission put into the store.

        Raises:
            ConflictError: a run with this id, or this repetition of the manifest, exists.
        """
        noted = functools.partial(self._edges.run, run.id, run.manifest_digest, artifacts, self._clock.now())
        columns = {name: value for name, value in to_columns(run).items() if name not in _JOINED}
        columns["project"] = self._project
        self._insert(runs, columns, f"run {run.id}", f"run.{run.state}", run.id, noted)
        for stage in run_stages:
            subject = f"{run.id}/{stage.name}"
            self._insert(stages, to_columns(stage), f"stage {subject}", f"stage.{stage.state}", subject)
        self._woken.add(run.id)

    def insert_attempt(self, attempt: AttemptRecord) -> None:
        """Insert a new attempt, before its job is launched.

        Raises:
            ConflictError: the number or the external name is already used.
        """
        subject = f"{attempt.run_id}/{attempt.stage}/{attempt.number}"
        self._insert(attempts, to_columns(attempt), f"attempt {attempt.name}", f"attempt.{attempt.state}", subject)
        if attempt.host is not None:
            settle_at(self._connection, self._project, attempt.run_id, attempt.host)
        self._woken.add(attempt.run_id)
        self.written.append(attempt)

    def update_run(
        self,
        run: RunRecord,
        *,
        state: str | None = None,
        event_payload: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> RunRecord:
        """Change a run, unless it has changed since `run` was read.

        The event is `run.<state>`, or `run.updated` without a new state.

        Args:
            state: the new state; the transition must be in the table of transitions.
            event_payload: facts for the event, in addition to the changed columns.
            columns: fields of `RunRecord` to set. Columns that already have the value are not changes; without any
                change nothing is written and `run` is returned.

        Returns:
            The new row, with the next generation.

        Raises:
            StaleWriteError: the row has changed since it was read.
            ConflictError: the transition is not in the table of transitions.
            InputError: a column cannot be set.
        """
        return self._update("run", run, run.id, state, event_payload, columns)

    def update_stage(
        self,
        stage: StageRecord,
        *,
        state: str | None = None,
        event_payload: Mapping[str, Any] | None = None,
        sizes: Sizes | None = None,
        taken: Mapping[str, str] | None = None,
        models: Sequence[Asset] = (),
        **columns: Any,
    ) -> StageRecord:
        """Change a stage, as `update_run` changes a run. Changed inputs and outputs are also written as edges.

        Args:
            models: the models among the outputs, as versions without a number. Each is registered as the next version
                of its name, unless a model with these bytes exists under any name.
            sizes: bytes of the outputs, if known.
            taken: for each input, the name of the producing stage's output, if known; otherwise the output is looked
                up by its bytes.
        """

        def joined(changes: Mapping[str, Any]) -> list[Change]:
            blobs = {name: changes[name] for name in ("inputs", "outputs", "cached_from") if name in changes}
            gone = self._edges.rebind(stage.run_id, stage.name) if stage.inputs and "inputs" in changes else []
            registered = self._register(models)
            known: dict[str, Any] = {
                "sizes": sizes or {},
                "taken": taken or {},
                "models": [model for model, _ in registered],
            }
            told = Told(stage.run_id, stage.name, self._clock.now(), **known, **blobs)
            noted = self._edges.stages(told) if blobs else []
            for model, added in registered:
                mine = [one for one in noted if model.ref in (one.key.get("consumer") or one.key.get("producer"),)]
                noted = [one for one in noted if one not in mine]
                self._journal.tell("asset.registered", model.ref, added, *mine)
            return gone + noted

        return self._update("stage", stage, f"{stage.run_id}/{stage.name}", state, event_payload, columns, joined)

    def update_attempt(
        self,
        attempt: AttemptRecord,
        *,
        state: str | None = None,
        event_payload: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> AttemptRecord:
        """Change an attempt, as `update_run` changes a run."""
        return self._update(
            "attempt", attempt, f"{attempt.run_id}/{attempt.stage}/{attempt.number}", state, event_payload, columns
        )

    def insert_asset(self, asset: Asset, sizes: Sizes | None = None) -> Asset:
        """Register a version of an asset. Registering the same content again returns the existing version.

        Args:
            asset: `version` 0 requests the next version.
            sizes: bytes of the version's content and of the objects that it names, if known.

        Returns:
            The latest version (or the version that `asset` names) if digest, form and meta are equal; otherwise the
            new version.

        Raises:
            ConflictError: the version exists with other content, or would leave a gap.
        """
        wanted = asset.version or None
        latest = self.snapshot.latest_asset(asset.kind, asset.name)
        following = latest.version + 1 if latest else 1
        known = self.snapshot.asset(asset.kind, asset.name, wanted) if wanted and wanted < following else latest
        if known and wanted in (None, known.version) and _content(known) == _content(asset):
            return known
        if wanted is not None and wanted != following:
            rule = "versions are immutable" if wanted < following else f"the next version is {following}"
            raise ConflictError(f"cannot register {asset.ref}: {rule}; register it as version {following}")
        new = replace(asset, version=following)
        columns = self._owned(new, "created_by")
        noted = functools.partial(self._edges.asset, new, sizes or {}, self._clock.now())
        self._insert(assets, columns, f"asset {new.ref}", "asset.registered", new.ref, noted)
        return new

    def lock_recalls(self, *, exclusive: bool = False) -> None:
        """Lock recalls until the end of this transaction: no recall commits while the transaction reads and acts.

        Args:
            exclusive: whether this transaction makes a recall, and therefore waits for all transactions that read.
        """
        if self._connection.dialect.name == "postgresql":  # SQLite has one writer at a time
            self._connection.execute(
                select(projects.c.id).where(projects.c.id == self._project).with_for_update(read=not exclusive)
            )

    def alone(self) -> None:
        """Serialise transactions, for decisions that no compare-and-set covers."""
        hold_off_others(self._connection)

    def leave_to(self, run_id: str, host: str | None) -> None:
        """Restrict a run to the drivers of a host; None: drivers of any host."""
        settle_at(self._connection, self._project, run_id, host)

    def lock_run(self, run_id: str, slots_of: str | None = None) -> str:
        """Lock a run's row until the end of this transaction: one driver at a time begins or ends parts of the run.

        Args:
            slots_of: a host whose slots this transaction counts; one driver at a time counts the slots.

        Returns:
            The run's state; empty if there is no such run.
        """
        columns: list[Any] = [runs.c.state]
        if slots_of is not None and self._connection.dialect.name == "postgresql":
            key = hashlib.sha256(f"slots of {slots_of}".encode()).digest()[:8]
            columns.append(func.pg_advisory_xact_lock(int.from_bytes(key, "big", signed=True)))
        mine = self.snapshot.scope.select(runs, *columns).where(runs.c.id == run_id)
        return self._connection.execute(mine.with_for_update()).scalar() or ""  # SQLite has one writer at a time

    def set_asset_status(self, asset: Asset, status: str, reason: str = "") -> AssetStatus:
        """Set the status of a version; an empty status removes it.

        Raises:
            ConflictError: another process sets it at the same time.
        """
        new = AssetStatus(
            asset.kind, asset.name, asset.version, status, self._journal.author.name, self._clock.now(), plain(reason)
        )
        columns, kind = self._owned(new, "actor"), f"asset.{status or 'status_removed'}"
        key = {column.name: columns.pop(column.name) for column in asset_status.primary_key}
        if not self._change(asset_status, key, columns, kind, asset.ref):
            self._insert(asset_status, {**key, **columns}, f"status of {asset.ref}", kind, asset.ref)
        return new

    def put_cache(self, cache_key: str, run_id: str, stage: str) -> None:
        """Set the stage for `cache_key`, replacing any earlier stage."""
        key, values = {"project": self._project, "cache_key": cache_key}, {"run_id": run_id, "stage": stage}
        subject = f"{run_id}/{stage}"
        if added := self._edges.add(stage_cache, [{**key, **values}]):
            self._journal.tell("stage.cached", subject, *added)
        else:
            self._change(stage_cache, key, values, "stage.cached", subject)

    def watch(self, watch: Watch) -> None:
        """Store the observation of a silent job. No event records it, because its loss costs little."""
        self._connection.execute(_WATCH, to_columns(watch))
        self.written.append(watch)

    def look_again(self, run_id: str) -> None:
        """Schedule the objects of a run that were set aside, at a person's request."""
        revive(self._connection, self._project, run_id)
        self._woken.add(run_id)

    def send_signal(self, run_id: str, name: str, reason: str = "") -> bool:
        """Send a signal, so that a stage of the run that waits for it continues; return False if it was sent earlier.

        Raises:
            ConflictError: another process sends it at the same time.
        """
        if any(signal.name == name for signal in self.snapshot.signals(run_id)):
            return False
        sent = Signal(run_id, name, self._journal.author.name, self._clock.now(), plain(reason))
        self._insert(signals, self._owned(sent, "actor"), f"signal {name} of run {run_id}", "signal.sent", run_id)
        self._woken.add(run_id)
        return True

    def note(self, run_id: str, text: str = "", tag: str = "") -> None:
        """Add a text or a tag to a run.

        Raises:
            ConflictError: another process adds a note or tag at the same time.
        """
        number = max((one.number for one in self.snapshot.notes(run_id)), default=0) + 1
        note = RunNote(run_id, number, self._journal.author.name, self._clock.now(), plain(text), tag)
        self._insert(
            notes,
            self._owned(note, "actor"),
            f"note {number} of run {run_id}",
            "run.tagged" if tag else "run.noted",
            run_id,
        )

    def untag(self, note: RunNote) -> None:
        """Remove a tag from a run, if the run has it."""
        key = {"project": self._project, "run_id": note.run_id, "number": note.number}
        if self._connection.execute(delete(notes).where(*keyed(notes, **key))).rowcount:
            self._journal.tell("run.untagged", note.run_id, Change(REMOVED, notes.name, key, {}))

    def append_event(
        self, kind: str, subject: str, facts: Mapping[str, Any], said: Mapping[str, Any] | None = None
    ) -> None:
        """Append an event about an object without a row.

        Args:
            facts: states, numbers, digests, kept permanently. Numbers outside canonical JSON's range become strings.
            said: free text and personal data, which may be erased.
        """
        self._journal.tell(kind, subject, facts=facts, said=said)

    def _register(self, wanted: Sequence[Asset]) -> list[tuple[Asset, Change]]:
        """Add versions of models whose bytes no model has yet, each with the change of its row for its event.

        Raises:
            ConflictError: other runs of these names kept registering versions at the same time.
        """
        made: list[tuple[Asset, Change]] = []
        left, races = list(wanted), _RACES
        known = self.snapshot.alike(*left) if left else []
        while left:
            if any(one.digest == left[0].digest for one in known):
                left.pop(0)
                continue
            versions = [one.version for one in known if one.name == left[0].name]
            new = replace(left[0], version=max(versions, default=0) + 1)
            try:
                made.append((new, self._added(assets, self._owned(new, "created_by"), f"asset {new.ref}")))
                known.append(new)
            except ConflictError:
                races -= 1
                if not races:
                    raise
                known = self.snapshot.alike(*left)
        return made

    def _update(
        self,
        machine: str,
        record: Record,
        subject: str,
        state: str | None,
        event_payload: Mapping[str, Any] | None,
        columns: Mapping[str, Any],
        joined: Callable[[Mapping[str, Any]], list[Change]] = lambda changes: [],
    ) -> Record:
        before = to_columns(record)
        changes = _changes(machine, before, columns)
        if state is not None:
            check_transition(machine, before["state"], state)
        elif not changes:
            return record
        generation = before["generation"] + 1
        values = {**changes, "generation": generation, "state": before["state"] if state is None else state}
        table, key = _TABLES[machine], {name: before[name] for name in _KEYS[machine]}
        was = {f"was_{name}": value for name, value in {**key, "generation": before["generation"]}.items()}
        was["of_project"] = self._project
        if not self._connection.execute(_compare_and_set(machine, frozenset(values)), {**values, **was}).rowcount:
            raise StaleWriteError(
                f"{machine} {subject} changed since it was read (generation {before['generation']}); read it again"
            )
        moved = {} if state is None else {"from": before["state"], "to": state}
        facts = {**moved, **(event_payload or {})}
        kind = f"{machine}.{'updated' if state is None else state}"
        self._journal.tell(kind, subject, Change(CHANGED, table.name, key, values), *joined(changes), facts=facts)
        self._followed(before["id"] if machine == "run" else before["run_id"], machine, values["state"])
        if machine == "stage" and before["cache_key"] and is_final("stage", values["state"]):
            self._woken |= self.snapshot.runs_that_wait_for(before["cache_key"])
        self.written.append(now := replace(record, **values))  # type: ignore[type-var]
        return now

    def _followed(self, run_id: str, machine: str, state: str) -> None:
        """Schedule a run after one of its rows has changed, or release the run if this transaction ended it."""
        if machine == "run" and is_final("run", state):
            self._ended.add(run_id)
            self._woken.discard(run_id)
        elif machine == "run" or run_id not in self._ended:
            self._ended.discard(run_id)
            self._woken.add(run_id)


@functools.cache
def _compare_and_set(machine: str, columns: frozenset[str]) -> Update:
    """Return the statement that updates these columns if the row is unchanged. Cached, because building it is slow."""
    table = _TABLES[machine]
    was = [table.c[name] == bindparam(f"was_{name}") for name in (*_KEYS[machine], "generation")]
    mine = of_project(table, bindparam("of_project"))
    return update(table).where(*was, mine).values({name: bindparam(name) for name in sorted(columns)})


def _content(asset: Asset) -> tuple[str, str, Any]:
    return asset.digest, asset.form, to_columns(asset)["meta"]


def _changes(machine: str, before: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns whose values change, with the values as the ledger would return them."""
    unknown = sorted(name for name in columns if name not in before or name in _FIXED or name in _KEYS[machine])
    if unknown:
        allowed = ", ".join(sorted(set(before) - _FIXED - set(_KEYS[machine])))
        raise InputError(f"column {unknown[0]!r} of a {machine} cannot be set; columns that can be set: {allowed}")
    read = {
        name: plain(
            json.loads(json.dumps(value, default=lambda one: dict(one) if isinstance(one, Mapping) else str(one)))
        )
        for name, value in columns.items()
    }
    return {name: value for name, value in read.items() if value != before[name]}
