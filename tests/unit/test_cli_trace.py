"""`posttrain trace` over finished runs: files, table, samples, and what it says when there is nothing to show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import World, make_world

from posttrain.domain.jobs import Sample, Span
from posttrain.store.attempts import AttemptFolder, EventWriter

EPOCH = 1_700_000_000.0


def sample(step: int, number: int, fate: str, reward: float | None = 1.0) -> Sample:
    trained = fate.startswith("update")
    return Sample(
        id=f"{step}.{10 * step}.{number}",
        step=step,
        prompt="Q: sort 3",
        response="A: [3]",
        prompt_tokens=[5, 6],
        tokens=[7, 8, 9],
        behaviour_logprobs=[-0.5, -0.25, -1.0],
        truncated=True,
        versions=["0.3"],
        reward=reward,
        fate=fate,
        components={"exact": 0.75},
        advantages=[0.5] * 3 if trained else [],
        logprobs=[-0.5, -0.25, -1.5] if trained else [],
        ratios=[1.0, 1.0, 0.6065] if trained else [],
        clipped=[False, False, True] if trained else [],
    )


def say(folder: AttemptFolder) -> None:
    """What a GRPO stage says of two steps: step 1 twice, as after a crash."""
    ranks = [[0, EPOCH + 0.1, 0.5], [1, EPOCH + 0.1, 0.3]]
    call = {"kind": "call", "role": "rollout", "method": "generate", "pool": "main", "ranks": ranks}
    with EventWriter(folder) as sink:
        sink(Span("rollout.generate", 0, EPOCH, 0.7, {**call, "bytes_out": 10, "bytes_in": 20, "imbalance": 1.2}))
        sink(Span("rollout", 0, EPOCH, 0.8))
        sink(Span("update", 0, EPOCH + 0.8, 0.2))
        for number in range(2):
            sink(sample(0, number, "dropped: group without signal"))
        sink(sample(1, 0, "dropped: no score", None))
        sink(sample(1, 0, "update 1, mini-batch 0"))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, str]]:
    """A finished run whose GRPO stage left spans and samples."""
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("trace"), patch)
        world.prepare()
        assert world("run", "run.yaml").exit_code == 0
        run = world.newest()
        (attempt,) = (world.root / ".posttrain" / "runs" / run / "grpo").glob("*/job.json")
        say(AttemptFolder(attempt.parent))
        yield world, run


def test_files_and_table_are_written(story: tuple[World, str], tmp_path: Path) -> None:
    world, run = story
    text = world.ok("trace", "sort", "--out", str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f"{run}-trace.json", f"{run}-trace.html"}
    for words in ("grpo: 1 steps in 1s", "rollout", "60.0%", "ui.perfetto.dev", "lists 3 recorded samples"):
        assert words in text
    trace = json.loads((tmp_path / "new" / f"{run}-trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"step 0", "rollout", "rollout.generate", "generate", "update"} <= names
    assert "1.20.0" not in (tmp_path / "new" / f"{run}-trace.html").read_text()
    assert "1.10.0" in (tmp_path / "new" / f"{run}-trace.html").read_text()


def test_programs_get_the_same_numbers(story: tuple[World, str], tmp_path: Path) -> None:
    world, run = story
    told = world.json("trace", run, "--stage", "grpo", "--out", str(tmp_path))
    (stage,) = told["stages"]
    controller, rollout = stage["roles"]
    assert (told["run"], told["samples"], stage["steps"]) == (run, 3, 1)
    assert (rollout["role"], rollout["ranks"], rollout["calls"]) == ("rollout", 2, 1)
    assert rollout["busy_seconds"] == pytest.approx(0.4)
    assert rollout["idle_share"] == pytest.approx(0.6)
    assert controller["busy_seconds"] == pytest.approx(0.3)
    assert stage["phase_shares"] == pytest.approx({"rollout": 0.8, "update": 0.2})


def test_samples_are_listed_by_step_and_a_redone_one_once(story: tuple[World, str]) -> None:
    world, run = story
    listed = world.json("trace", run, "--samples")["samples"]
    assert [one["id"] for one in listed] == ["0.0.0", "0.0.1", "1.10.0"]
    assert listed[-1]["fate"] == "update 1, mini-batch 0"
    assert [one["id"] for one in world.json("trace", run, "--samples", "--step", "1")["samples"]] == ["1.10.0"]
    text = world.ok("trace", run, "--samples")
    assert "A: [3]" in text  # not markup
    assert "dropped: group without signal" in text


def test_a_sample_is_shown_token_by_token(story: tuple[World, str]) -> None:
    world, run = story
    text = world.ok("trace", run, "--sample", "1.10.0")
    for words in ("'A: [3]' (3 tokens, cut", "0.3 sampled it", "1 (ok): exact 0.75", "update 1, mini-batch 0"):
        assert words in text
    last = text.rstrip().splitlines()[-1].split()
    assert last == ["2", "9", "-1", "-1.5", "0.6065", "0.5", "yes"]
    dropped = world.ok("trace", run, "--sample", "0.0.1")
    assert "ratio" not in dropped
    assert world.json("trace", run, "--sample", "1.10.0")["ratios"] == [1.0, 1.0, 0.6065]


def test_an_unknown_sample_names_the_nearest_and_how_to_record_more(story: tuple[World, str]) -> None:
    world, run = story
    result = world("trace", run, "--sample", "1.11.0")
    assert result.exit_code == 2
    assert "nearest recorded: 1.10.0" in result.stderr
    assert "trace: {groups: all}" in result.stderr
    nothing = world("trace", run, "--sample", "1.11.0", "--stage", "sft")
    assert "has recorded no sample" in nothing.stderr
    assert world("trace", run, "--sample", "what?").exit_code == 2


def test_what_does_not_go_together_is_refused(story: tuple[World, str]) -> None:
    world, run = story
    for words in (
        ("--sample", "0.0.0", "--samples"),
        ("--step", "1"),
        ("--samples", "--out", "x"),
        ("--stage", "grpoo"),
        ("--stage", "sft"),
    ):
        result = world("trace", run, *words)
        assert result.exit_code == 2, words
        assert len(result.stderr.strip().splitlines()) == 1
    assert "did you mean 'grpo'?" in world("trace", run, "--stage", "grpoo").stderr
    assert f"stage sft of run {run} has reported no spans" in world("trace", run, "--stage", "sft").stderr
    assert "no sample was recorded" in world.ok("trace", run, "--samples", "--stage", "sft")


def test_a_segment_that_cannot_be_read_is_left_out_and_told(story: tuple[World, str], tmp_path: Path) -> None:
    world, run = story
    (folder,) = (world.root / ".posttrain" / "runs" / run / "grpo").glob("*/samples")
    segment = sorted(folder.iterdir())[0]
    kept = segment.read_bytes()
    segment.write_bytes(b"{")
    try:
        assert "left out: event segment" in world.ok("trace", run, "--out", str(tmp_path))
        assert "left out: event segment" in world("trace", run, "--samples").stderr
    finally:
        segment.write_bytes(kept)
