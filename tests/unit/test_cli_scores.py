"""Scores in `get`, `why` and their JSON: before and after, with intervals, through the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_world import BAD_REWARD, ITEMS, RUN, World, make_world, metrics_table

from posttrain.domain.jobs import Progress
from posttrain.store.attempts import AttemptFolder, EventWriter

EVALUATE = "  evaluate: {kind: evaluate, model: grpo, suites: {heldout: {data: heldout}}}\n"
BASE = "  base-eval: {kind: evaluate, model: base, suites: {heldout: {data: heldout}}}\n"
SFT = "  sft-eval: {kind: evaluate, model: sft, suites: {heldout: {data: heldout}}}\n"
ABSOLUTE = "\n".join(line for line in RUN.splitlines() if "no-regression" not in line)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def test_no_before_is_said_to_be_none(world: World) -> None:
    world.write("run.yaml", ABSOLUTE)
    shown = world.ok("run", "run.yaml")
    for text in (shown, world.ok("get", "sort"), world.ok("why", "sort")):
        (line,) = [line for line in text.splitlines() if line.startswith("heldout/accuracy  (stage grpo)")]
        assert "not measured" in line
        assert "0.980 [0.950, 0.995]" in line
        assert "exact limit of a rate (Clopper-Pearson)" in text
        assert "add an evaluate stage of the starting model" in text
    (row,) = world.json("get", "sort")["scores"]["rows"]
    assert row["before"] == []
    assert (row["metric"], row["suite"], row["of"]) == ("heldout/accuracy", "heldout", "stage grpo")


def test_base_and_earlier_stage_are_befores_and_no_rows_of_their_own(world: World) -> None:
    world.write("run.yaml", ABSOLUTE.replace(EVALUATE, BASE + SFT + EVALUATE))
    world.ok("run", "run.yaml")
    scores = world.json("why", "sort")["scores"]
    assert scores["confidence"] == 0.95
    rows = {row["stage"]: row for row in scores["rows"]}
    assert list(rows) == ["evaluate", "sft-eval"], "the released model's first; the base model's is nobody's after"
    assert [one["of"] for one in rows["evaluate"]["before"]] == ["base model:tiny@1", "stage sft"]
    base, sft = rows["evaluate"]["before"]
    assert (base["value"], sft["value"], rows["evaluate"]["value"]) == (0.1, 0.5, 0.98)
    gained = base["difference"]
    assert (gained["higher"], gained["lower"], gained["same"]) == (176, 0, 24)
    assert gained["low"] < gained["value"] < gained["high"]
    assert gained["value"] == pytest.approx(0.88)
    assert "McNemar" in gained["method"]
    text = world.ok("get", "sort")
    assert "before: base model:tiny@1" in text
    assert "+0.88 [+0.8" in text


@pytest.mark.slow
def test_the_channels_model_comes_first_and_a_reused_stage_has_its_scores(world: World) -> None:
    world.ship()
    world.write("again.yaml", RUN.replace("steps: 6", "steps: 5").replace(EVALUATE, BASE + EVALUATE))
    world.ok("run", "again.yaml")
    (row,) = world.json("get", world.newest())["scores"]["rows"]
    assert [one["of"] for one in row["before"]] == ["channel prod", "base model:tiny@1"]
    assert row["before"][0]["difference"]["value"] == 0
    world.ok("run", "again.yaml", "--again")
    assert "reused from" in world.ok("get", world.newest())
    (again,) = world.json("get", world.newest())["scores"]["rows"]
    assert again["value"] == row["value"]


def test_a_run_that_trains_nothing_has_values_and_no_before(world: World) -> None:
    stages = {
        line for line in ABSOLUTE.splitlines() if line.startswith(("  sft", "  grpo", "  evaluate", "         probe"))
    }
    kept = [
        line for line in ABSOLUTE.splitlines() if line not in stages and not line.startswith(("gates", "  - ", "rel"))
    ]
    world.write("run.yaml", "\n".join([*kept, BASE]))
    world.ok("run", "run.yaml")
    shown = world.ok("get", "sort")
    assert "heldout/accuracy  (model:tiny@1)    200  0.100 [0.062, 0.150]" in shown
    assert "before" not in shown


def test_another_data_set_of_the_same_name_is_no_before(world: World) -> None:
    world.write("other.jsonl", "".join(f'{{"prompt": "Q: {n}", "answer": "{n}"}}\n' for n in range(200)))
    world.ok("asset", "add", "dataset:other", "other.jsonl")
    world.write(
        "run.yaml",
        ABSOLUTE.replace("heldout: dataset:heldout", "heldout: dataset:heldout, other: dataset:other").replace(
            EVALUATE, BASE.replace("{data: heldout}", "{data: other}") + EVALUATE
        ),
    )
    world.ok("run", "run.yaml")
    rows = {row["stage"]: row for row in world.json("get", "sort")["scores"]["rows"]}
    assert rows["evaluate"]["before"] == rows["base-eval"]["before"] == []


@pytest.mark.slow
def test_a_before_stands_once_where_two_suites_have_the_same_data(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both(right: int, first: int = 0) -> bytes:
        """The same items under two names; as `again`, one of them fewer is right."""
        tables = [
            pq.read_table(io.BytesIO(metrics_table(n, first))).set_column(0, "metric", pa.array([name] * ITEMS))
            for name, n in (("again/accuracy", right - 1), ("heldout/accuracy", right))
        ]
        sink = io.BytesIO()
        pq.write_table(pa.concat_tables(tables), sink)
        return sink.getvalue()

    monkeypatch.setattr("cli_world.metrics_table", both)
    two = "suites: {heldout: {data: heldout}, again: {data: heldout}}"
    alike = BASE.replace("suites: {heldout: {data: heldout}}", two)
    world.write(
        "run.yaml", ABSOLUTE.replace(EVALUATE, alike + EVALUATE.replace("suites: {heldout: {data: heldout}}", two))
    )
    world.ok("run", "run.yaml")
    rows = {row["metric"]: row for row in world.json("why", "sort")["scores"]["rows"]}
    assert list(rows) == ["again/accuracy", "heldout/accuracy"]
    befores = {metric: [(one["of"], one["value"]) for one in row["before"]] for metric, row in rows.items()}
    assert befores == {
        "again/accuracy": [("base model:tiny@1", 0.095)],
        "heldout/accuracy": [("base model:tiny@1", 0.1)],
    }
    world.write("run.yaml", ABSOLUTE.replace(EVALUATE, alike + EVALUATE))
    world.ok("run", "run.yaml")
    for text in (world.ok("get", world.newest()), world.ok("why", world.newest())):
        assert text.count("before: base model:tiny@1") == text.count("heldout/accuracy  (stage grpo)") == 1


def test_results_that_are_gone_are_told_and_end_nothing(world: World) -> None:
    world.write("run.yaml", ABSOLUTE)
    world.ok("run", "run.yaml")
    stages = world.json("get", "sort")["stages"]
    digest = next(s["outputs"]["metrics"]["digest"] for s in stages if s["name"] == "evaluate").partition(":")[2]
    (world.root / ".posttrain" / "blobs" / "sha256" / digest[:2] / digest[2:]).unlink()
    shown = world.ok("get", "sort")
    assert "score left out: evaluate: " in shown
    assert world.json("get", "sort")["scores"]["rows"] == []


def test_audit_26_a_model_worse_than_before_is_the_first_thing_said(world: World) -> None:
    """It ships: its gate asks for little."""
    world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD))
    world.write("run.yaml", ABSOLUTE.replace(EVALUATE, SFT + EVALUATE).replace("at_least: 0.9", "at_least: 0.1"))
    (hint,) = [line for line in world.ok("plan", "run.yaml").splitlines() if "no gate compares with another" in line]
    assert "{name: no-regression, metric: heldout/accuracy, not_worse_than: base, margin: 0.02}" in hint
    last = world.ok("run", "run.yaml")
    assert world.json("get", "prod")["live"] is not None
    words = "warning: stage grpo is significantly worse than stage sft: heldout/accuracy 0.5 → 0.3, -0.20 [-0.26"
    gate = "{name: no-regression, metric: heldout/accuracy, not_worse_than: sft, margin: 0.02}"
    for shown in (world.ok("get", "sort"), world.ok("why", "sort")):
        assert " ".join(shown.split()).startswith(words), shown
        assert gate in " ".join(shown.split())
    assert " ".join(last.split()).index(words) < " ".join(last.split()).index("stage kind state")
    (line,) = world.json("get", "sort")["scores"]["regressions"]
    assert f"add to gates: {gate}" in line
    world.ok("export", "prod", "out")
    card = (world.root / "out" / "README.md").read_text()
    assert "**Warning**: stage grpo is significantly worse than stage sft" in card
    assert json.loads((world.root / "out" / "lineage.json").read_text())["regressions"] == [line]
    world.ok("get", "sort", "--report")
    page = (world.root / ".posttrain" / "runs" / world.newest() / "report.html").read_text()
    assert page.index("significantly worse than stage sft") < page.index("Scores</h2>")
    text = (world.root / "run.yaml").read_text()
    world.write("run.yaml", text.replace("at_least: 0.1}", f"at_least: 0.1}}\n  - {gate}"))
    result = world("run", "run.yaml")
    assert (result.exit_code, world.json("get", world.newest())["reason"]) == (3, "GateFailed"), (
        "it would have stopped it"
    )


def test_a_regression_of_a_run_without_a_release_suggests_no_gate(world: World) -> None:
    world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD))
    alone = ABSOLUTE.replace(EVALUATE, SFT + EVALUATE).partition("gates:")[0]
    world.write("run.yaml", alone)
    world.ok("run", "run.yaml")
    lines = world.json("get", "sort")["scores"]["regressions"]
    assert any("stage grpo is significantly worse than stage sft" in line for line in lines)
    assert not [line for line in lines if "gates" in line]


def test_audit_26_an_improvement_and_a_change_by_chance_warn_of_nothing(world: World) -> None:
    world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD.replace("0.3", "0.49")))
    world.write("run.yaml", ABSOLUTE.replace(EVALUATE, BASE + SFT + EVALUATE).replace("at_least: 0.9", "at_least: 0.1"))
    world.ok("run", "run.yaml")
    assert world.json("get", "sort")["scores"]["regressions"] == []


def test_audit_31_tokens_are_counted_while_a_stage_runs(world: World) -> None:
    world.hold.add("grpo")
    assert world("run", "run.yaml", "--timeout", "30").exit_code == 12
    before = world.json("get", "sort")["tokens"]
    (folder,) = (world.root / ".posttrain" / "runs" / world.newest() / "grpo").iterdir()
    with EventWriter(AttemptFolder(folder)) as sink:
        sink(Progress(1, 3, "grpo", 4321, 0.0))
    after = world.json("get", "sort")
    assert after["tokens"] == before + 4321
    assert {one["name"]: one["tokens"] for one in after["stages"]}["grpo"] == 4321
