"""What every tracker must honour: nothing twice and nothing lost, whatever ended the writer before."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tracker_targets import BENCHES, RUN, Bench, Point, each

from posttrain.domain.errors import WorkspaceError
from posttrain.telemetry.tracker import (
    ChannelState,
    Ending,
    Registry,
    Row,
    TrackedRun,
    Tracker,
    Version,
    missing,
)
from posttrain.telemetry.trackers.csv import CsvTracker
from posttrain.telemetry.trackers.mlflow import MlflowTracker
from posttrain.telemetry.trackers.parquet import ParquetTracker
from posttrain.telemetry.trackers.tensorboard import TensorBoardTracker
from posttrain.telemetry.trackers.wandb import WandbTracker

STAGES = ("sft", "grpo", "gate", "baseline-sft.evaluate")
ABOUT = TrackedRun(RUN, "sort", "ada", "sha256:" + "ab" * 32, 1.7e9, {"seed": 3, "sft.steps": 6}, STAGES)
ROWS = [
    *(Row("sft", step, 1.7e9 + step, {"loss": 1 / step, "grad_norm": step * 0.1}) for step in range(1, 7)),
    *(Row("grpo", step, 1.7e9 + 10 + step, {"reward/mean": step / 3}) for step in range(1, 4)),
    Row("grpo", 3, 1.7e9 + 13, {"probe/pass@4": 0.75}),
    Row("baseline-sft.evaluate", 0, 1.7e9 + 14, {"heldout/accuracy": 0.5}),
    Row("gate", 0, 1.7e9 + 20, {"accuracy/passed": 1.0}),
]
DONE = Ending("succeeded", "shipped", 1.7e9 + 21, {"evaluate/accuracy": 0.98}, {"accuracy": "pass"})


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    made: Bench = BENCHES[request.param](tmp_path / "target")
    return made


def expected(rows: Sequence[Row], tracker: Tracker) -> list[Point]:
    return [(row.stage, tracker.name(name), row.step, value) for row in rows for name, value in row.values.items()]


def close(found: Sequence[Point], wanted: Sequence[Point]) -> None:
    """Equal as float32, in the order of each metric."""
    first, second = sorted(found, key=lambda p: p[:2]), sorted(wanted, key=lambda p: p[:2])
    assert [point[:3] for point in first] == [point[:3] for point in second]
    assert [float32(point[3]) for point in first] == [float32(point[3]) for point in second]


def float32(value: float) -> str:
    return repr(struct.unpack("f", struct.pack("f", value))[0])


def write(bench: Bench, rows: Sequence[Row], ending: Ending | None = None, *, about: TrackedRun = ABOUT) -> None:
    """What a process writes that reads all the rows there are, and ends well."""
    tracker = bench.tracker()
    cursor = tracker.begin(about)
    named = (Row(r.stage, r.step, r.at, {tracker.name(m): v for m, v in r.values.items()}) for r in rows)
    fresh = list(missing(named, cursor))
    for row in fresh:
        tracker.log([row])
    tracker.flush()
    if ending:
        tracker.end(ending)
    tracker.close()


@pytest.mark.parametrize("bench", each(), indirect=True)
def test_everything_said_is_there_once(bench: Bench) -> None:
    write(bench, ROWS, DONE)
    close(bench.points(), expected(ROWS, bench.tracker()))
    assert bench.state() in ("succeeded", "")
    for _ in range(2):
        write(bench, ROWS, DONE)
    close(bench.points(), expected(ROWS, bench.tracker()))


@pytest.mark.parametrize("bench", each(), indirect=True)
def test_a_writer_goes_on_where_the_one_before_ended(bench: Bench) -> None:
    for many in (0, 1, 5, 8):
        write(bench, ROWS[:many])
    write(bench, ROWS, Ending("failed", "", 1.0))
    close(bench.points(), expected(ROWS, bench.tracker()))
    more = [*ROWS, Row("grpo", 4, 1.7e9 + 30, {"reward/mean": 0.5})]  # the failed run was retried
    write(bench, more, DONE)
    close(bench.points(), expected(more, bench.tracker()))
    assert bench.state() in ("succeeded", "")


@pytest.mark.parametrize("bench", each(), indirect=True)
def test_what_was_cut_short_is_mended_and_written_again(bench: Bench) -> None:
    write(bench, ROWS[:6])
    for _ in range(2):
        bench.tear()
        write(bench, ROWS[:6])
    bench.tear()
    write(bench, ROWS, DONE)
    close(bench.points(), expected(ROWS, bench.tracker()))


@pytest.mark.parametrize("bench", each(), indirect=True)
def test_two_runs_do_not_meet(bench: Bench) -> None:
    if bench.tracker().kind == "fake":
        pytest.skip("a fake's target is of one run")
    other = TrackedRun("sort-12", "sort", "ada", "sha256:cd", 1.7e9, {}, ("sft",))  # its id begins with the first's
    write(bench, ROWS[:2], DONE)
    write(bench, ROWS[:3], DONE, about=other)
    write(bench, ROWS[:4], DONE)
    close(bench.points(), expected(ROWS[:4], bench.tracker()))
    close(bench.points("sort-12"), expected(ROWS[:3], bench.tracker()))


@pytest.mark.parametrize("bench", each(), indirect=True)
def test_odd_names_and_values_arrive(bench: Bench) -> None:
    names = ["pass@1", "a b", 'quo"te', "kom,ma", "größe", "../up", "step", "50%", "x" * 60, "a.b", "_under", "日本"]
    names += [
        "pass_at_1",
        "grüße",
        "本日",
        "step_",
        "step__",
        "x" * 200 + "1",
        "x" * 200 + "2",
    ]
    odd = [Row("sft", step, 1.7e9 + step, dict.fromkeys(names, step / 4)) for step in (0, 1)]
    odd += [Row("sft", 5, 1.7e9, {"loss": math.nan}), Row("sft", 6, 1.7e9, {"loss": math.inf})]
    odd += [Row("sft", 2**40, 1.7e9, {"loss": -1e-12, "tokens": 1e30})]
    write(bench, odd[:2])
    write(bench, odd, DONE)
    wanted, found = expected(odd, bench.tracker()), bench.points()
    assert sorted(p[:3] for p in found) == sorted({p[:3] for p in wanted})
    assert len({p[1] for p in wanted}) == len(names) + 2, "no two of these names are one in the target"
    values = {p[:3]: p[3] for p in found}
    assert math.isnan(values["sft", "loss", 5])
    assert values["sft", "loss", 6] > 1e300
    assert values["sft", "tokens", 2**40] == pytest.approx(1e30)


OURS, THEIRS = (replace(ABOUT, workspace=letter * 32, created_at=at) for letter, at in (("a", 1.7e9), ("b", 1.8e9)))


@pytest.mark.parametrize("bench", each(), indirect=True)
def test_a_run_that_another_workspace_wrote_is_refused(bench: Bench) -> None:
    failed = Ending("failed", "", 1.0)
    write(bench, ROWS[:2], failed)  # of before workspaces had an identity
    write(bench, ROWS[:3], failed, about=OURS)
    for _ in range(2):
        told = "another workspace has written its run sort-1 to this location; name a different location"
        with pytest.raises(WorkspaceError, match=told):
            write(bench, ROWS, DONE, about=THEIRS)
    close(bench.points(), expected(ROWS[:3], bench.tracker()))
    write(bench, ROWS, DONE, about=OURS)
    close(bench.points(), expected(ROWS, bench.tracker()))


@pytest.mark.parametrize("bench", each("fake"), indirect=True)
def test_one_process_writes_a_target_at_a_time(bench: Bench) -> None:
    first, second = bench.tracker(), bench.tracker()
    first.begin(OURS)
    first.log(ROWS[:2])
    for about in (OURS, THEIRS):
        with pytest.raises(WorkspaceError, match="another process writes run sort-1 there; wait until it ends"):
            second.begin(about)
        second.close()
    first.log(ROWS[2:4])
    first.end(DONE)
    first.close()
    write(bench, ROWS, DONE, about=OURS)
    close(bench.points(), expected(ROWS, bench.tracker()))


NAMERS: list[Tracker] = [
    CsvTracker(Path("x")),
    ParquetTracker(Path("x")),
    TensorBoardTracker(Path("x")),
    MlflowTracker("x", "e", "m"),
    WandbTracker(Path("x"), "p", None, "offline"),
]
SIGNS = st.text(st.sampled_from("a@_t/.-0é准\\ "), min_size=1, max_size=8) | st.sampled_from(["step", "step_"])


@pytest.mark.parametrize("tracker", NAMERS, ids=lambda tracker: tracker.kind)
@settings(derandomize=True, deadline=None, max_examples=200)
@given(first=SIGNS, second=SIGNS)
def test_no_two_metrics_have_one_name(tracker: Tracker, first: str, second: str) -> None:
    if first != second:
        assert tracker.name(first) != tracker.name(second)
        assert tracker.name(tracker.name(first)) != tracker.name(second) or tracker.name(first) == second


def test_what_mlflow_calls_a_metric() -> None:
    name = MlflowTracker("x", "e", "m").name
    assert [name(plain) for plain in ("loss", "reward/mean", "pass@4")] == ["loss", "reward/mean", "pass_at_4"]
    alike = [
        "reward/准确",
        "reward/长度",
        "reward/__",
        "caf\u00e9",
        "cafü",
        "a@1",
        "a_at_1",
        "_at@",
        "@at_",
        "a//b",
        "a/b",
    ]
    alike += ["x" * 180, "x" * 180 + "1", "x" * 180 + "2", name("reward/准确"), "Loss\n", "../up"]
    assert len({name(one) for one in alike}) == len(alike)
    assert all(re.fullmatch(r"[\w./ -]{1,180}", name(one), re.ASCII) for one in alike)
    assert name("reward/准确").startswith("reward/__-"), "the readable part stays"
    assert name("a_at_1").startswith("a_at_1-")


MODELS = [f"sha256:{letter * 64}" for letter in "abc"]


def channel(live: int, *models: int, name: str = "prod") -> ChannelState:
    versions = [Version(MODELS[m], RUN, {"run": RUN, "lineage": "dataset train"}) for m in models]
    return ChannelState(name, versions, MODELS[live], "file:///store")


@pytest.mark.parametrize("bench", each("csv", "parquet", "tensorboard", "wandb"), indirect=True)
def test_versions_and_aliases_follow_the_channels(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(bench, ROWS[:1], DONE)
    moves = [channel(0, 0), channel(1, 0, 1), channel(0, 0, 1), channel(2, 2, name="latest"), channel(2, 0, 1, 2)]
    for move in moves:
        for _ in range(2):  # asked twice, or killed and asked again
            registry = bench.tracker()
            assert isinstance(registry, Registry)
            registry.follow(move)
        digests, aliases = released(bench)
        assert aliases["prod" if move.channel == "prod" else "channel-latest"] == move.live
        assert len(digests) == len(set(digests))
    assert digests == [MODELS[0], MODELS[1], MODELS[2]]
    assert not list((tmp_path / "here").iterdir()), "nothing is left where the command was typed"


def released(bench: Any) -> tuple[list[str], dict[str, str]]:
    """Digests of versions in their order, and alias → digest."""
    if bench.tracker().kind == "fake":
        aliases = dict(bench.target.aliases)
        return bench.target.versions, aliases | {"channel-latest": aliases.get("latest", "")}
    client = bench.client()
    versions = sorted(client.search_model_versions("name='sorter'"), key=lambda v: int(v.version))
    for version in versions:
        assert version.source == "posttrain:///" + version.tags["posttrain.digest"].replace(":", "/")
        assert version.run_id == bench.run(RUN).info.run_id
        assert version.tags["posttrain.lineage"] == "dataset train"
    by_number = {str(v.version): v.tags["posttrain.digest"] for v in versions}
    found = client.get_registered_model("sorter").aliases
    return list(by_number.values()), {alias: by_number[str(number)] for alias, number in found.items()}
