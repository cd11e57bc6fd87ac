"""`GET /metrics`: who may read it, what it says, and that no name of anybody is in it."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_bench import KEY, ServerBench, served

from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import WorkspaceError
from posttrain.domain.ids import Role
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.domain.sinks import Rule, SinkRecord
from posttrain.server import metrics
from posttrain.server.metrics import SharedCounters
from posttrain.store.ledger import ledger_counts
from posttrain.store.schema import SCHEMA_VERSION

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path / "served") as made:
        made.person("root", Role.ADMIN)
        yield made


def samples(text: str) -> Samples:
    """As Prometheus reads it."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def read(bench: ServerBench) -> Samples:
    found = bench.ask("GET", "/metrics", KEY)
    assert found.status == 200
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(found.body.decode())


def one(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def secret_project(bench: ServerBench) -> None:
    """Runs of states, a sink, a dead letter: of a project whose names are nobody else's business."""
    seen = bench.workspace.seen_by("user:root", "hidden", "os")
    bench.person("eve", Role.ADMIN, "hidden")
    for number, state in enumerate(("pending", "pending", "pending")):
        run = RunRecord(f"secret-{number}aaaaaaa", "secret", digest_json(number), state, "eve", 0.0, project="hidden")
        with seen.ledger.transaction("user:eve") as transaction:
            transaction.insert_run(run, [StageRecord(run.id, "hold", 0, "wait", "pending")])
    with seen.ledger.transaction("user:eve") as transaction:
        settings = {"path": "/nowhere/hidden.jsonl"}
        transaction.add_sink(SinkRecord("hidden-sink", "jsonl", settings, (Rule(),), 0.0, "user:eve"), 0)


@pytest.mark.parametrize(
    ("name", "role", "project", "status"),
    [
        ("watcher", Role.VIEWER, "default", 200),
        ("eve", Role.ADMIN, "hidden", 404),  # of another project
        ("none", None, "default", 403),
    ],
)
def test_whoever_may_look_into_the_first_project_reads_it(
    bench: ServerBench, name: str, role: Role | None, project: str, status: int
) -> None:
    assert bench.ask("GET", "/metrics", bench.person(name, role, project)).status == status
    assert bench.ask("GET", "/metrics", None).status == 401
    assert bench.ask("GET", "/metrics", "posttrain_" + "x" * 43).status == 401


def test_it_counts_requests_by_verb_and_status_and_never_by_a_name(bench: ServerBench) -> None:
    secret_project(bench)
    for path in ("/v1/projects/default/runs?limit=1", "/v1/projects/hidden/runs?limit=1", "/v1/projects/none/runs"):
        bench.ask("GET", path, bench.tokens["root"])
    bench.ask("GET", "/anything/at/all", KEY)
    found = read(bench)
    assert one(found, "posttrain_requests_total", verb="ls", status="200") == 1
    assert one(found, "posttrain_requests_total", verb="ls", status="403") == 1  # a role in it, and another's token
    assert one(found, "posttrain_requests_total", verb="ls", status="404") == 1
    assert one(found, "posttrain_requests_total", verb="none", status="404") == 1
    assert one(found, "posttrain_request_seconds_count", verb="ls") == 3
    assert one(found, "posttrain_requests_in_flight") == 1  # this one
    said = " ".join(str(value) for _, labels in found for value in labels)
    for word in ("hidden", "secret", "eve", "root", "default"):
        assert word not in said


def test_it_says_how_runs_queue_log_and_sinks_stand(bench: ServerBench) -> None:
    secret_project(bench)
    found = read(bench)
    assert one(found, "posttrain_runs", state="pending") == 3
    assert one(found, "posttrain_runs", state="failed") == 0
    assert one(found, "posttrain_work_due") == 3
    assert 0 <= one(found, "posttrain_work_oldest_seconds") < 1e6  # due at once, and not since 1970
    assert one(found, "posttrain_work_dead") == 0
    assert one(found, "posttrain_events_unsealed") > 0
    assert one(found, "posttrain_sinks", kind="jsonl", state="delivering") == 1
    assert one(found, "posttrain_up", of="database") == one(found, "posttrain_up", of="store") == 1
    assert one(
        found, "posttrain_build_info", version="0.1.0", schema=SCHEMA_VERSION, python=metrics.platform.python_version()
    )
    bench.workspace.seal()
    now = ledger_counts(bench.workspace.ledger.database, bench.workspace.ledger.clock)
    assert now.unsealed == 0
    assert now.sealed > 0
    assert now.sinks["jsonl"].behind >= 1


def test_what_waits_grows_older_as_long_as_nobody_looks_at_it(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret_project(bench)
    clock = [1000.0]
    stopped = types.SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: clock[0])
    monkeypatch.setattr(metrics, "time", stopped)
    meters = metrics.Meters(bench.workspace)
    ages = []
    for _ in range(3):
        ages.append(one(samples(meters.page().decode()), "posttrain_work_oldest_seconds"))
        clock[0] += 60.0
    assert ages == [0.0, 60.0, 120.0]


def test_what_hangs_or_is_away_is_shown_and_readers_do_not_wait_for_it(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def away(*_: Any) -> Any:
        asked.append(1)
        raise WorkspaceError("cannot use the ledger: it is away")

    monkeypatch.setattr(metrics, "ledger_counts", away)
    first, second = read(bench), read(bench)
    assert one(first, "posttrain_up", of="database") == one(second, "posttrain_up", of="database") == 0
    assert one(second, "posttrain_probe_failures_total", of="database") == 1
    assert len(asked) == 1  # however many ask, it is asked once in a while
    assert ("posttrain_work_due", ()) not in second


def test_a_driver_shows_what_it_does_in_memory_that_both_have(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = SharedCounters()
    assert counters.read() == {}
    shown = {"passes": 7.0, "seconds": 11.5, "errors": 2.0, "at": metrics.time.monotonic()}
    SharedCounters(counters.descriptor).write(shown)
    assert counters.read() == shown
    meters = metrics.Meters(None, counters.read, lambda: {"driver": [metrics.psutil.Process().pid], "worker": []})
    found = samples(meters.page().decode())
    assert one(found, "posttrain_driver_up") == 1
    assert one(found, "posttrain_driver_passes_total") == 7
    assert one(found, "posttrain_driver_errors_total") == 2
    assert one(found, "posttrain_resident_memory_bytes", process="driver") > 0
    assert one(found, "posttrain_processes", process="worker") == 0
    counters.clear()
    assert one(samples(meters.page().decode()), "posttrain_driver_up") == 0
    counters.close()
