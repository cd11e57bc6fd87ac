"""The attempt folder: orders in, facts and a result out, checkpoints that count only when they are whole."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import latest_checkpoint
from hypothesis import HealthCheck, given, settings, strategies as st

from posttrain.domain.canonical import canonical_json, digest_bytes
from posttrain.domain.errors import FailureClass, IntegrityError, NotFoundError, WorkspaceError
from posttrain.domain.jobs import (
    Fact,
    Failure,
    InputBlob,
    JobOrder,
    JobResult,
    Metric,
    Note,
    Output,
    Progress,
    Sample,
    Span,
)
from posttrain.store.atomic import write_atomic
from posttrain.store.attempts import AttemptFolder, EventWriter
from posttrain.store.mailbox import EVENTS, SAMPLES, ControlKind, Mailbox, Summary

DIGEST = "sha256:" + "a" * 64
ORDER = JobOrder(
    name="run1-train-1",
    kind="grpo",
    seed=2**62 + 1,  # beyond what a double can hold
    params={"learning_rate": 5e-4, "runtime": {"threads": 1}},
    inputs={"model": InputBlob(DIGEST, "tree", "model:tiny@1")},
    store_url="file:///store",
    cache_dir="/cache",
    resume=DIGEST,
)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    folder = AttemptFolder(tmp_path / "001")
    folder.write_order(ORDER)
    return folder


def checkpoint(attempt: AttemptFolder, step: int, tokens: int | None = None) -> Path:
    folder = attempt.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    shards = {"model.safetensors": b"weights %d" % step}
    if tokens is not None:
        shards["state.json"] = json.dumps({"tokens": tokens}).encode()
    for name, data in shards.items():
        (folder / name).write_bytes(data)
    digests = {name: digest_bytes(data) for name, data in shards.items()}
    commit = {"format": "posttrain.checkpoint/1", "step": step, "shards": digests}
    (folder / "COMMIT").write_bytes(canonical_json(commit))
    return folder


def test_orders_and_results_come_back_as_they_were(attempt: AttemptFolder) -> None:
    assert attempt.read_order() == ORDER
    assert attempt.read_result() is None
    for number, result in enumerate(
        (
            JobResult("succeeded", {"model": Output("outputs/model", "tree")}, {"accuracy": 0.1 + 0.2}, 12, 3.5),
            JobResult("failed", failure=Failure(FailureClass.DIVERGED, "loss is NaN at step 3", "DivergedError@step")),
        )
    ):
        own = AttemptFolder(attempt.path / str(number))
        own.write_result(result)
        assert own.read_result() == result


def test_a_result_may_hold_a_metric_that_is_not_a_number(attempt: AttemptFolder) -> None:
    attempt.write_result(JobResult("succeeded", metrics={"loss": math.nan, "ratio": math.inf}))
    result = attempt.read_result()
    assert result is not None
    assert math.isnan(result.metrics["loss"])
    assert result.metrics["ratio"] == math.inf


def test_what_cannot_be_read_says_so(tmp_path: Path, attempt: AttemptFolder) -> None:
    with pytest.raises(NotFoundError, match=r"no job\.json"):
        AttemptFolder(tmp_path / "nowhere").read_order()
    for name, read in (("job.json", attempt.read_order), ("result.json", attempt.read_result)):
        for bad in (b"{", b"[]", b'{"inputs": {}}', b'{"outputs": {}, "colour": 1}'):
            (attempt.path / name).write_bytes(bad)
            with pytest.raises(IntegrityError, match=name):
                read()
    attempt.request_stop()
    for bad in (b"{", b"[]", b'{"kind": "dance", "at": 1}'):
        (attempt.path / "controls" / "000001.json").write_bytes(bad)
        with pytest.raises(IntegrityError, match=r"controls/000001\.json"):
            attempt.stop_requested()


@pytest.mark.parametrize("name", ["result.json", "job.json", "summary.json", "events/000001.jsonl", "meter"])
def test_no_job_fills_the_memory_of_who_reads_what_it_left(attempt: AttemptFolder, name: str) -> None:
    """A file of holes has any size at no cost."""
    attempt.write_order(ORDER)
    path = attempt.path / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    reads = (attempt.read_order, attempt.read_result, attempt.metered, attempt.facts, attempt.last_progress)
    refused = 0
    for read in (*reads, attempt.mailbox.started, attempt.mailbox.summary):
        try:
            read()
        except IntegrityError:
            refused += 1
    silent = name == "summary.json"  # who only looks how far a job is is told nothing
    assert refused == (2 if name.startswith("events") else 0 if silent else 1)


def test_json_of_any_depth_is_damage(attempt: AttemptFolder) -> None:
    attempt.path.mkdir(parents=True, exist_ok=True)
    (attempt.path / "result.json").write_text("[" * 1_000_000)
    with pytest.raises(IntegrityError):
        attempt.read_result()


def test_requests_add_up(attempt: AttemptFolder) -> None:
    assert (attempt.stop_requested(), attempt.checkpoints_requested()) == (False, 0)
    for ask in (attempt.request_checkpoint, attempt.request_stop, attempt.request_stop, attempt.request_checkpoint):
        ask()
    assert (attempt.stop_requested(), attempt.checkpoints_requested()) == (True, 2)
    assert [control.kind for control in attempt.mailbox.controls()] == ["checkpoint", "stop", "checkpoint"]


def test_what_was_carried_out_is_acknowledged_and_no_more(attempt: AttemptFolder) -> None:
    for ask in (attempt.request_checkpoint, attempt.request_stop, attempt.request_checkpoint):
        ask()
    attempt.acknowledge(ControlKind.CHECKPOINT, 1)
    assert [attempt.mailbox.acknowledged(number) for number in (1, 2, 3)] == [True, False, False]
    attempt.acknowledge(ControlKind.STOP)
    assert [attempt.mailbox.acknowledged(number) for number in (1, 2, 3)] == [True, True, False]


def test_who_reads_how_far_a_job_is_reads_no_segment(attempt: AttemptFolder) -> None:
    with EventWriter(attempt, seconds=1e9) as sink:
        sink(Note("first", 0.0))
        sink(Progress(3, 9, "sft", 70, 5.0))
    (attempt.events / "000002.jsonl").write_bytes(b"{")
    assert attempt.mailbox.summary() == Summary(3, 9, "sft", 70, 2, 5.0)
    (attempt.path / "summary.json").write_bytes(b"")  # what a power cut leaves
    assert attempt.mailbox.summary() is None


_FLOATS = st.floats(allow_nan=False)
_TEXT = st.text(max_size=12)
_STEPS = st.integers(0, 10**9)
_FACTS = st.one_of(
    st.builds(Metric, _STEPS, st.dictionaries(_TEXT, _FLOATS, max_size=3), _FLOATS),
    st.builds(Progress, _STEPS, _STEPS, _TEXT, st.integers(0, 2**62), _FLOATS),
    st.builds(Span, _TEXT, _STEPS, _FLOATS, _FLOATS, st.dictionaries(_TEXT, st.integers() | _TEXT, max_size=2)),
    st.builds(Note, _TEXT, _FLOATS, st.sampled_from(["info", "warning"])),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(facts=st.lists(_FACTS, max_size=12), most=st.integers(1, 5), read_at=st.integers(0, 12))
def test_facts_come_back_in_order_whatever_the_segments(
    tmp_path_factory: pytest.TempPathFactory, facts: list[Fact], most: int, read_at: int
) -> None:
    attempt = AttemptFolder(tmp_path_factory.mktemp("attempt"))
    seen: list[Fact] = []
    last = 0
    with EventWriter(attempt, most=most, seconds=1e9) as sink:
        for number, fact in enumerate(facts):
            sink(fact)
            if number == read_at:
                new, last = attempt.facts(last)
                seen += new
    new, last = attempt.facts(last)
    assert seen + new == facts
    assert attempt.facts(last) == ([], last)
    assert attempt.last_progress() == next((f for f in reversed(facts) if isinstance(f, Progress)), None)


def test_a_fact_after_a_pause_is_written_at_once_and_a_burst_together(attempt: AttemptFolder) -> None:
    sink = EventWriter(attempt, most=100, seconds=1e9)
    sink(Note("first", 0.0))
    assert attempt.facts() == ([Note("first", 0.0)], 1)
    sink(Note("second", 1.0))
    sink(Note("third", 2.0))
    assert attempt.facts(1) == ([], 1)
    sink.close()
    assert attempt.facts(1) == ([Note("second", 1.0), Note("third", 2.0)], 2)
    sink.close()  # nothing left: no empty segment
    assert attempt.facts(2) == ([], 2)


def test_a_long_step_does_not_hide_the_progress_before_it(attempt: AttemptFolder) -> None:
    with EventWriter(attempt, seconds=0.0) as sink:
        step = (Span("update", 0, 0.0, 60.0), Metric(1, {"loss": 1.0}, 60.0), Progress(1, 2, "sft", 10, 60.0))
        for fact in step:
            sink(fact)
        assert attempt.facts() == (list(step), 1)


def sample(name: str) -> Sample:
    return Sample(
        id=name,
        step=0,
        prompt="1+1=",
        response="2\u2028",
        prompt_tokens=[4, 5],
        tokens=[6],
        behaviour_logprobs=[-0.5],
        truncated=False,
        versions=["0.1"],
        reward=1.0,
        fate="update 0, mini-batch 0",
        components={"exact": 1.0},
    )


def test_some_samples_are_read_of_segments_from_the_first_to_the_last(attempt: AttemptFolder) -> None:
    for step in range(9):
        with EventWriter(attempt) as sink:
            sink(sample(f"{step}.0.0"))
    assert [one.id for one in attempt.some_samples(3)] == ["0.0.0", "4.0.0", "8.0.0"]
    assert len(attempt.some_samples(50)) == 9
    (attempt.samples / "000005.jsonl").write_text("{")
    assert [one.id for one in attempt.some_samples(3)] == ["0.0.0", "8.0.0"], "looking harms nobody"


def test_samples_lie_beside_the_facts_and_come_back(attempt: AttemptFolder) -> None:
    assert attempt.recorded_samples() == []
    with EventWriter(attempt, seconds=1e9) as sink:
        sink(Note("first", 0.0))
        sink(sample("0.0.0"))
        sink(Progress(1, 2, "grpo", 10, 1.0))
    assert attempt.facts()[0] == [Note("first", 0.0), Progress(1, 2, "grpo", 10, 1.0)]
    with EventWriter(attempt) as sink:
        sink(sample("0.0.1"))
    assert [path.name for path in sorted(attempt.samples.iterdir())] == ["000001.jsonl", "000002.jsonl"]
    found = attempt.recorded_samples()
    assert [one.id for one in found] == ["0.0.0", "0.0.1"]
    assert found[0].response == "2\u2028"
    assert found[0].components == {"exact": 1.0}


def test_no_sample_no_folder_and_a_damaged_segment_is_named_or_left_out(attempt: AttemptFolder) -> None:
    with EventWriter(attempt) as sink:
        sink(Note("first", 0.0))
    assert not attempt.samples.exists()
    for name in ("0.0.0", "0.0.1"):
        with EventWriter(attempt) as sink:
            sink(sample(name))
    (attempt.samples / "000001.jsonl").write_bytes(b"{")
    with pytest.raises(IntegrityError, match=r"samples/000001\.jsonl"):
        attempt.recorded_samples()
    told: list[IntegrityError] = []
    assert [one.id for one in attempt.recorded_samples(told.append)] == ["0.0.1"]
    assert len(told) == 1


def test_samples_too_are_written_with_the_progress_of_their_step(attempt: AttemptFolder) -> None:
    with EventWriter(attempt, seconds=0.0) as sink:
        sink(sample("0.0.0"))
        assert attempt.recorded_samples() == []
        sink(Progress(1, 2, "grpo", 10, 1.0))
        assert len(attempt.recorded_samples()) == 1


def test_who_sees_a_steps_progress_finds_its_samples(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    written, append = [], Mailbox.append

    def noted(self: Mailbox, stream: str, number: int, data: bytes) -> None:
        written.append(stream)
        append(self, stream, number, data)

    monkeypatch.setattr(Mailbox, "append", noted)
    with EventWriter(attempt, seconds=0.0) as sink:
        sink(sample("0.0.0"))
        sink(Progress(1, 2, "grpo", 10, 1.0))
        assert written == [SAMPLES, EVENTS]


def test_so_many_facts_and_samples_wait_and_no_more(attempt: AttemptFolder) -> None:
    with EventWriter(attempt, most=4, seconds=1e9) as sink:
        for number in range(3):
            sink(sample(f"0.0.{number}"))
        assert attempt.recorded_samples() == []
        sink(Metric(1, {}, 0.0))
        assert (len(attempt.recorded_samples()), attempt.facts()) == (3, ([Metric(1, {}, 0.0)], 1))


def test_no_segment_is_larger_than_may_be_read_at_once(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Metric(step, {"loss": 1.0}, 0.0) for step in range(5)]
    with EventWriter(attempt, seconds=1e9) as sink:
        sink(told[0])
    size = (attempt.events / "000001.jsonl").stat().st_size
    monkeypatch.setattr("posttrain.store.attempts.LINE", 2 * size)
    with EventWriter(attempt, seconds=1e9) as sink:
        for fact in told[1:]:
            sink(fact)
    assert [path.stat().st_size for path in sorted(attempt.events.glob("*.jsonl"))] == [size, 2 * size, 2 * size]
    assert attempt.facts()[0] == told


def test_numbering_goes_on_where_another_writer_stopped(attempt: AttemptFolder) -> None:
    for word in ("one", "two"):
        with EventWriter(attempt) as sink:
            sink(Note(word, 0.0))
    assert [path.name for path in sorted(attempt.events.iterdir())] == ["000001.jsonl", "000002.jsonl"]
    assert attempt.facts(1) == ([Note("two", 0.0)], 2)


def test_a_segment_that_cannot_be_read_is_named(attempt: AttemptFolder) -> None:
    attempt.events.mkdir()
    for bad in (b"{", b'{"type": "colour"}', b'{"type": "note"}', b"[]", b"\xff"):
        (attempt.events / "000001.jsonl").write_bytes(bad + b"\n")
        with pytest.raises(IntegrityError, match="segment"):
            attempt.facts()


def test_only_whole_checkpoints_count(attempt: AttemptFolder) -> None:
    assert attempt.checkpoint_steps() == []
    assert latest_checkpoint(attempt) is None
    whole = [checkpoint(attempt, step, tokens=step * 10) for step in (2, 10)]
    uncommitted = checkpoint(attempt, 20)
    (uncommitted / "COMMIT").unlink()
    (checkpoint(attempt, 30) / "model.safetensors").write_bytes(b"flipped")
    (checkpoint(attempt, 40) / "model.safetensors").unlink()
    (checkpoint(attempt, 50) / "COMMIT").write_bytes(b'{"format"')
    (checkpoint(attempt, 60) / "COMMIT").write_bytes(b'{"format":"posttrain.checkpoint/2","shards":{},"step":60}')
    (checkpoint(attempt, 70) / "COMMIT").write_bytes(b'{"format":"posttrain.checkpoint/1","shards":{},"step":70}')
    found = [attempt.checkpoint(step) for step in attempt.checkpoint_steps()]
    assert [one.path for one in found if one] == whole
    latest = latest_checkpoint(attempt)
    assert latest is not None
    assert (latest.path, latest.step, latest.tokens) == (whole[-1], 10, 100)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond a thousand bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_no_fact(attempt: AttemptFolder, request: pytest.FixtureRequest) -> None:
    sink = EventWriter(attempt, most=2)
    sink(Note("before", 0.0))
    request.getfixturevalue("small_disk")
    sink(Note("x" * 2000, 1.0))
    with pytest.raises(WorkspaceError, match="the disk is full"):
        sink(Note("more", 2.0))
    assert [path.name for path in attempt.events.iterdir()] == ["000001.jsonl"]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    sink.close()
    assert len(attempt.facts()[0]) == 3


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, small_disk: None) -> None:
    write_atomic(tmp_path / "file", b"as before")
    with pytest.raises(WorkspaceError, match="the disk is full"):
        write_atomic(tmp_path / "file", b"x" * 5000)
    with pytest.raises(WorkspaceError, match="cannot write"):
        write_atomic(tmp_path / "file" / "below", b"x")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"as before")]


def test_a_job_loads_neither_database_nor_object_store() -> None:
    program = "import sys, posttrain.store.attempts; print(sorted({n.split('.')[0] for n in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {"sqlalchemy", "alembic", "obstore", "pydantic", "torch"} & set(json.loads(loaded.replace("'", '"')))
