"""What must hold of a simulated history: while it happens, and at its end."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from sim_ports import Rows
from sim_world import World

from posttrain.domain.ports import BlobStore
from posttrain.domain.records import AttemptRecord, StageRecord
from posttrain.store.audit import verify_rows
from posttrain.store.ledger import Stores
from posttrain.store.sealer import seal, verify_chain
from posttrain.store.trees import tree_listing, verify_tree

HEEDED_SECONDS = 600.0  # from a stop to its end, once no fault comes any more
LOOKED_SECONDS = 400.0  # until a driver that has a run looks at what waits there; a lease is shorter, of one that froze
_HELD = "SELECT object, lease_owner FROM work WHERE kind = 'run' AND lease_owner IS NOT NULL AND lease_until > ?"
_BACKED_OFF = (  # a stage with a row of its own in the queue raised, and has a time of its own
    "SELECT run_id, name FROM stages WHERE state = 'ready' AND reason = 'BackOff' AND not_before <= ? "
    "AND NOT EXISTS (SELECT 1 FROM work WHERE kind = 'stage' AND object = run_id || '/' || name) "
    "AND NOT EXISTS (SELECT 1 FROM stages AS other WHERE other.run_id = stages.run_id AND other.state = 'failed')"
)
_FINAL = ("succeeded", "failed", "rejected", "stopped")


class Unheard:
    """What stages wait for, and what is there: a signal that was sent, the end of a back-off; since when that is so."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._held: dict[tuple[str, str], float] = {}  # the same, where a living driver has had the run all the time

    def check(self, world: World, rows: Rows, signals: Collection[str], living: Collection[str]) -> None:
        """None waits long once it is calm; nor ever where a driver lives and holds its lease, which renews it.

        In a run that failed with another stage nobody waits: the stage stays ready for a retry.
        """
        query = "SELECT run_id FROM stages JOIN runs ON runs.id = run_id WHERE stages.name = 'approval' "
        query += "AND stages.state = 'ready' AND runs.state NOT IN ('failed', 'rejected', 'stopped', 'succeeded')"
        waiting = {(run_id, "a signal that was sent") for (run_id,) in rows.all(query) if run_id in signals}
        waiting |= {
            (run_id, f"a back-off of {stage} that is over") for run_id, stage in rows.all(_BACKED_OFF, world.now())
        }
        self._since = {one: self._since.get(one, world.time) for one in waiting}
        for (run_id, what), since in self._since.items():
            late = world.time - max(since, world.calm_after)
            world.must(late < HEEDED_SECONDS, f"{run_id} waits {late:.0f} s for {what}")
        held = {run_id for run_id, owner in rows.all(_HELD, world.now()) if owner in living} if waiting else set()
        self._held = {one: self._held.get(one, world.time) for one in waiting if one[0] in held}
        for (run_id, what), since in self._held.items():
            late = world.time - since
            world.must(late < LOOKED_SECONDS, f"{run_id} waits {late:.0f} s for {what}, and a driver has it")


def check_now(world: World, rows: Rows, stops: dict[str, float], living: set[str]) -> None:
    """What must hold at any time, once no fault comes any more: nobody is forgotten."""
    for error, name in rows.all("SELECT error, object FROM work WHERE error LIKE 'unexpected%'"):
        world.must(False, f"a look at {name} raised {error}")
    if world.time < world.calm_after + HEEDED_SECONDS:
        return
    for run_id, asked in stops.items():
        state = rows.one("SELECT state FROM runs WHERE id = ?", run_id)
        late = world.time - max(asked, world.calm_after)
        world.must(state in _FINAL or late < HEEDED_SECONDS, f"{run_id} is {state}, {late:.0f} s after a stop")
    stale = (
        "SELECT object, lease_owner FROM work WHERE kind = 'run' AND lease_until < ?"  # sweeps: while somebody drives
    )
    held = rows.all(stale, world.now() - HEEDED_SECONDS)
    for name, owner in held:
        world.must(owner is None or owner in living, f"{name} is held by {owner}, who died long ago")


def check_end(world: World, stores: Stores, rows: Rows) -> dict[str, int]:
    """What must hold at the end; how much of what there was."""
    for run_id, state, reason in rows.all("SELECT id, state, reason FROM runs"):
        world.must(state in _FINAL, f"{run_id} is {state} ({reason}) at the end")
    for name, *_ in rows.all("SELECT object FROM work WHERE kind <> 'sweep'"):
        world.must(False, f"the queue holds {name} though its run has ended")
    seal(stores.ledger)
    world.must(verify_chain(stores.ledger).pending == 0, "events are not sealed")
    verify_rows(stores.ledger)
    _stages(world, stores, rows)
    _releases(world, rows, stores.blobs)
    return {
        name: int(rows.one(f"SELECT count(*) FROM {name}"))
        for name in ("runs", "stages", "attempts", "releases", "events")
    }


def check_budgets(world: World, rows: Rows, stores: Stores, spent: Mapping[str, int]) -> None:
    """No run's jobs spent more than it declared, and what they spent is billed."""
    for run_id, tokens in spent.items():
        budget = stores.manifest(stores.ledger.run(run_id)).budget.tokens
        world.must(budget is None or tokens <= budget, f"{run_id} spent {tokens} of {budget} tokens")
        billed = rows.one("SELECT sum(tokens) FROM attempts WHERE run_id = ?", run_id)
        world.must(billed >= tokens, f"{run_id} spent {tokens} tokens and is billed {billed}")


def check_told(world: World, rows: Rows, told: Sequence[tuple[str, ...]], answered: Sequence[str]) -> None:
    """Nothing is lost: neither what a person was told that there is, nor what a job had to say."""
    for what in told:
        if len(what) == 1:
            there = rows.one("SELECT count(*) FROM runs WHERE id = ?", *what)
        else:
            query = "SELECT count(*) FROM releases WHERE channel = ? AND sequence = ? AND model_digest = ?"
            there = rows.one(query, *what)
        world.must(there == 1, f"a person was told of {' '.join(what)}, and there is no such thing")
    for name in answered:
        state = rows.one("SELECT state FROM attempts WHERE name = ?", name)
        world.must(state == "succeeded", f"{name} left its result, and the attempt is {state}")


def _stages(world: World, stores: Stores, rows: Rows) -> None:
    """At most one attempt of a stage published; what it left is there, and is what it left."""
    query = "SELECT subject, kind FROM events WHERE kind IN ('attempt.succeeded', 'stage.succeeded')"
    told: dict[tuple[str, str], int] = {}
    for subject, kind in rows.all(query):
        place = ("/".join(str(subject).split("/")[:2]), str(kind))
        told[place] = told.get(place, 0) + 1
    for (place, kind), times in told.items():
        world.must(times == 1, f"{place}: {times} events {kind}")
    for (run_id,) in rows.all("SELECT id FROM runs"):
        attempts = stores.ledger.attempts(run_id)
        for stage in stores.ledger.stages(run_id):
            own = [one for one in attempts if one.stage == stage.name]
            winners = [one for one in own if one.state == "succeeded"]
            live = [one for one in own if one.state in ("planned", "launched")]
            world.must(not live, f"{run_id}/{stage.name} is {stage.state} and an attempt is {live and live[0].state}")
            if stage.state == "succeeded":
                _outputs(world, stores.blobs, stage, winners, f"{run_id}/{stage.name}")
        for attempt in attempts:
            if attempt.resume is not None:
                verify_tree(stores.blobs, attempt.resume)


def _outputs(world: World, blobs: BlobStore, stage: StageRecord, winners: list[AttemptRecord], name: str) -> None:
    cached = stage.cached_from
    for output, blob in stage.outputs.items():
        if blob["form"] == "tree":
            verify_tree(blobs, blob["digest"])
        else:
            blobs.get(blob["digest"])
        if output in ("model", "items"):  # written by the job whose result says so, not by a twin of it
            file = (
                tree_listing(blobs, blob["digest"])["model.safetensors"].digest if output == "model" else blob["digest"]
            )
            left, by = blobs.get(file).decode(), f"job {stage.metrics['by']:.0f}"
            world.must(left == by, f"{name}: {output} is what {left} left, and {by} has the result")
    if name.rpartition("/")[2] not in ("gate", "approval", "release"):
        world.must(len(winners) == (0 if cached else 1), f"{name} succeeded by {len(winners)} attempts, from {cached}")


def _releases(world: World, rows: Rows, blobs: BlobStore) -> None:
    """The history of every channel is a line, and moves forward by a PASS on exactly that model only."""
    query = "SELECT channel, sequence, action, model_digest, report_digest FROM releases ORDER BY channel, sequence"
    last: dict[str, tuple[int, str]] = {}
    for channel, sequence, action, model, report_digest in rows.all(query):
        before, digest = last.get(channel, (0, ""))
        world.must(sequence == before + 1, f"{channel}: release {sequence} follows {before}")
        world.must(model != digest, f"{channel}: release {sequence} is published twice")
        verify_tree(blobs, model)
        report = json.loads(blobs.get(report_digest))
        world.must(report["candidate"] == model, f"{channel}: release {sequence} by a report of another model")
        judged = report["release"] if report["channel"] == channel else None
        world.must(action != "promote" or judged in (None, before), f"{channel}: {sequence} was judged at {judged}")
        passed = all(one["outcome"] == "pass" for one in report["verdicts"])
        world.must(passed, f"{channel}: release {sequence} ({action}) by a report that does not pass")
        last[channel] = (sequence, model)
