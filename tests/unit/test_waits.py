"""Stages that wait: for a time, for a signal; a run file and commands, and a clock that only sleepers move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN as FILE, World, make_world
from control_bench import RUN, Bench, evaluate, train
from sqlalchemy import Engine, event

from posttrain.control.actions import retry, send_signal, stop
from posttrain.control.reconciler import POLL_SECONDS, Reconciler
from posttrain.domain.errors import InputError
from posttrain.domain.waits import span
from posttrain.store.audit import verify_rows
from posttrain.store.sealer import seal

HOUR = 3600.0
GO = {"kind": "wait", "signal": "go", "within": "24h", "after": ["gate"]}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    scripts: dict[str, Any] = {"sft": [train()], "evaluate": [evaluate(195)]}
    return Bench(tmp_path, scripts | {"baseline-evaluate": [evaluate(100)]})


def waiting(wait: dict[str, Any], before: str = "evaluate") -> dict[str, Any]:
    """The bench's run with a stage `pause` before one of its stages, or before its release."""
    stages = {**RUN["stages"], "pause": wait}
    if before == "release":
        return {"stages": stages, "release": {**RUN["release"], "after": ["pause"]}}
    return {"stages": {**stages, before: {**stages[before], "after": ["pause"]}}}


def row(bench: Bench, run_id: str, name: str = "pause") -> Any:
    return next(stage for stage in bench.ledger.stages(run_id) if stage.name == name)


def until_quiet(bench: Bench, run_id: str) -> Any:
    """Passes by drivers that each die after one, until one finds nothing to do."""
    for number in range(60):
        driver = Reconciler(bench.stores, bench.jobs, f"driver{number}", alive=lambda owner: owner == f"driver{number}")  # noqa: B023
        tick = driver.tick(run_id)
        assert tick is not None
        if not tick.changed or tick.run.state in ("succeeded", "failed", "rejected", "stopped"):
            return tick
    raise AssertionError("it never comes to rest")


def test_a_time_is_computed_once_and_survives_every_driver(bench: Bench) -> None:
    run_id = bench.submit(**waiting({"kind": "wait", "for": "2h", "after": "sft"}))
    tick = until_quiet(bench, run_id)
    due = row(bench, run_id).not_before
    assert due == bench.clock.now() + 2 * HOUR
    assert (row(bench, run_id).state, row(bench, run_id).reason) == ("ready", "WaitingForTime")
    assert tick.again_after == 2 * HOUR
    queued = bench.reconciler.queue.look("run", run_id)
    assert queued is not None
    assert queued.due_at == due, "nobody looks before"
    bench.clock.time += HOUR
    until_quiet(bench, run_id)
    assert (row(bench, run_id).not_before, row(bench, run_id).state) == (due, "ready")
    bench.clock.time -= 3 * HOUR  # a clock that is set back waits longer, and loses nothing
    until_quiet(bench, run_id)
    bench.clock.time = due - 1
    until_quiet(bench, run_id)
    assert "evaluate" not in bench.launched
    bench.clock.time = due + 1e6  # and one that is set forward is there
    assert until_quiet(bench, run_id).run.state == "succeeded"
    assert row(bench, run_id).message == "waited 2 h"
    assert bench.launched.count("evaluate") == 1
    seal(bench.ledger)
    assert verify_rows(bench.ledger)


def test_a_run_goes_on_when_somebody_sends_its_signal(bench: Bench) -> None:
    run_id = bench.submit(**waiting(GO, before="release"))
    until_quiet(bench, run_id)
    found = row(bench, run_id)
    assert (found.state, found.reason) == ("ready", "WaitingForSignal")
    assert found.next_action == f"posttrain signal {run_id} go"
    assert bench.ledger.channel("prod") is None
    assert row(bench, run_id, "gate").state == "succeeded"
    bench.clock.time += HOUR
    first, new = send_signal(bench.stores, run_id, "go", "looked at \0 it")
    assert new
    assert bench.reconciler.queue.due() == {run_id}, "in the same transaction"
    assert send_signal(bench.stores, run_id, "go", "once more") == (first, False)
    assert until_quiet(bench, run_id).run.state == "succeeded"
    assert bench.ledger.channel("prod") is not None
    assert send_signal(bench.stores, run_id, "go") == (first, False), "also when it has ended"
    seal(bench.ledger)
    assert verify_rows(bench.ledger)


def test_a_signal_counts_that_came_before_its_stage_did(bench: Bench) -> None:
    run_id = bench.submit(**waiting(GO, before="release"))
    send_signal(bench.stores, run_id, "go")
    assert bench.drive(run_id).state == "succeeded"
    assert row(bench, run_id).reason == "WaitOver"


def test_two_conditions_must_both_come(bench: Bench) -> None:
    both = {"kind": "wait", "for": "1h", "signal": "go", "after": "sft"}
    run_id = bench.submit(**waiting(both))
    until_quiet(bench, run_id)
    assert row(bench, run_id).message.endswith("UTC and for signal go")
    bench.clock.time += 2 * HOUR
    until_quiet(bench, run_id)
    assert row(bench, run_id).reason == "WaitingForSignal"
    send_signal(bench.stores, run_id, "go")
    assert until_quiet(bench, run_id).run.state == "succeeded"
    other = bench.submit(again=True, **waiting(both))
    send_signal(bench.stores, other, "go")
    until_quiet(bench, other)
    assert row(bench, other).reason == "WaitingForTime"


def test_a_signal_that_does_not_come_fails_its_stage_and_a_retry_waits_anew(bench: Bench) -> None:
    run_id = bench.submit(**waiting(GO, before="release"))
    tick = until_quiet(bench, run_id)
    assert tick.again_after == 24 * HOUR
    bench.clock.time += 24 * HOUR
    assert until_quiet(bench, run_id).run.state == "failed"
    assert (row(bench, run_id).reason, row(bench, run_id).message) == (
        "SignalMissed",
        "signal go did not arrive within 1 day",
    )
    with pytest.raises(InputError, match=f"ended .failed., so it receives no signal; posttrain retry {run_id} first"):
        send_signal(bench.stores, run_id, "go")
    retry(bench.stores, bench.jobs.folders, run_id)
    assert until_quiet(bench, run_id).again_after == 24 * HOUR
    send_signal(bench.stores, run_id, "go")
    assert until_quiet(bench, run_id).run.state == "succeeded"


def test_what_waits_holds_no_slot_and_stop_ends_it_at_once(bench: Bench) -> None:
    pauses = {f"pause{n}": {"kind": "wait", "signal": f"s{n}"} for n in range(5)}
    run_id = bench.submit(stages={**RUN["stages"], **pauses}, budget={"wall_clock": "2h"})
    until_quiet(bench, run_id)
    assert row(bench, run_id, "release").state == "succeeded", "though two slots are all there is"
    bench.clock.time += 100 * HOUR  # of which the budget knows nothing
    until_quiet(bench, run_id)
    stop(bench.stores, run_id)
    assert until_quiet(bench, run_id).run.state == "stopped"
    assert {row(bench, run_id, name).state for name in pauses} == {"stopped"}
    retry(bench.stores, bench.jobs.folders, run_id)
    for number in range(5):
        send_signal(bench.stores, run_id, f"s{number}")
    assert until_quiet(bench, run_id).run.state == "succeeded"


def test_waiting_is_no_part_of_what_is_computed(bench: Bench) -> None:
    assert bench.drive(bench.submit()).state == "succeeded"
    computed = len(bench.launched)
    run_id = bench.submit(**waiting({"kind": "wait", "for": "1m", "after": "sft"}))
    assert bench.drive(run_id).state == "succeeded"
    assert row(bench, run_id, "evaluate").reason == "CacheHit"
    assert len(bench.launched) <= computed + 1, "but the new baseline"


@contextmanager
def statements() -> Iterator[list[str]]:
    said: list[str] = []

    def hear(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement)

    event.listen(Engine, "before_cursor_execute", hear)
    try:
        yield said
    finally:
        event.remove(Engine, "before_cursor_execute", hear)


@pytest.mark.slow
def test_waiting_costs_questions_to_the_queue_and_the_lease(bench: Bench) -> None:
    run_id = bench.submit(**waiting({"kind": "wait", "signal": "go", "after": "sft"}))
    while row(bench, run_id).reason != "WaitingForSignal" or bench.reconciler.step(run_id).changed:
        bench.reconciler.step(run_id)
    ends = bench.clock.now() + HOUR / 3  # four sweeps, and hundreds of everything else
    with statements() as said:
        while bench.clock.now() < ends:
            assert not bench.reconciler.step(run_id).changed
            bench.clock.sleep(0.25)
    asked = [one for one in said if one.startswith("SELECT work.object")]
    kept = [one for one in said if one.startswith("UPDATE work SET lease_until")]
    assert 0 < len(asked) <= HOUR / 3 / POLL_SECONDS + 1
    assert 0 < len(kept) <= HOUR / 3 / 5 + 1
    swept = [one for one in said if one not in asked + kept and not one.startswith(("BEGIN", "COMMIT", "PRAGMA"))]
    assert not [one for one in swept if any(table in one for table in ("stages", "attempts", "events", "signals"))]
    assert len(swept) <= 0.1 * len(asked), "a sweep for lost jobs now and then, which is nobody's alone"


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        ({}, "must have `for`"),
        ({"within": "1h", "for": "1m"}, "`within` needs `signal`, got none"),
        ({"signal": "go", "for": "1h", "within": "1h"}, "`within` must be longer than `for`"),
        ({"signal": "Go!"}, "signal"),
        ({"for": "soon"}, "must be a duration such as 90s"),
        ({"fro": "1h"}, "did you mean 'for'"),
        ({"for": "1h", "after": ["sfd"]}, "stages.pause.after: no stage 'sfd' (did you mean 'sft'?)"),
        ({"for": "1h", "after": ["pause"]}, "circle"),
        ({"for": "1h", "trainer": "other"}, "a wait stage has no trainer"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(bench: Bench, wait: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        bench.submit(**waiting({"kind": "wait", **wait}))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_file_without_them_is_the_same_manifest(bench: Bench) -> None:
    manifest = bench.stores.manifest(bench.ledger.run(bench.submit()))
    assert all("after" not in stage for stage in manifest.to_json()["stages"])
    assert "after" not in manifest.to_json()["release"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(7200, "2 h"), (5400, "1 h 30 min"), (86400, "1 day"), (2 * 86400 + 60, "2 days"), (0.5, "0.5 s"), (0, "0 s")],
)
def test_a_span_in_words(seconds: float, words: str) -> None:
    assert span(seconds) == words


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    stages = (
        "  night: {kind: wait, for: 2h, after: sft}\n  approval: {kind: wait, signal: go, within: 24h, after: gate}\n"
    )
    text = FILE.replace("gates:\n", f"{stages}gates:\n").replace("model: grpo}\n", "model: grpo, after: approval}\n")
    world.write("run.yaml", text.replace("grpo: {kind: grpo,", "grpo: {kind: grpo, after: night,"))
    return world


@pytest.mark.slow
def test_as_a_person_sees_it(world: World) -> None:
    planned = world.ok("plan", "run.yaml")
    assert "waits 2 h" in planned
    assert "for signal go, at most 1 day (posttrain signal RUN go)" in " ".join(planned.split())
    assert world("run", "run.yaml", "--timeout", "60").exit_code == 12
    run_id = world.newest()
    told = " ".join(world.ok("why", run_id).split())
    assert "stage night waits until" in told
    assert "(WaitingForTime) next:" in told
    assert "(in 1 h 5" in told
    assert "night waits until" in " ".join(world.ok("ls").split())
    world.clock.sleep(2 * HOUR / 50)
    assert world("attach", run_id, "--timeout", "600").exit_code == 12
    told = " ".join(world.ok("why", run_id).split())
    assert "stage approval waits for signal go (until" in told
    assert f"posttrain signal {run_id} go" in told
    (line,) = [line for line in world("attach", run_id, "--timeout", "60").stdout.splitlines() if " approval " in line]
    assert "waits for signal go (until" in line
    assert line.endswith(f"next: posttrain signal {run_id} go")
    wrong = world("signal", run_id, "og")
    assert wrong.exit_code == 2
    assert "(did you mean 'go'?)" in wrong.stderr
    assert wrong.stderr.count("\n") == 1
    assert "signal go sent" in world.ok("signal", run_id, "go", "--reason", "ada looked at it: größer")
    assert "already" in world.ok("signal", run_id, "go")
    said = " ".join(world.ok("why", run_id).split())
    assert "signal go was sent, so the wait has ended" in said, "though nobody drives it"
    assert f"posttrain signal {run_id}" not in said
    assert "ada looked at it: größer" in world.ok("get", run_id)
    assert [sent["name"] for sent in world.json("get", run_id)["signals"]] == ["go"]
    world.ok("attach", run_id)
    assert world.json("get", run_id)["state"] == "succeeded"
    world.ok("verify", run_id)
    world.ok("erase", run_id, "--reason", "asked to")
    assert "größer" not in world.ok("get", run_id)
    world.ok("verify", run_id)
