"""The results that a harness leaves: what becomes of them, and which are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet
import pytest

from posttrain.domain.errors import BudgetExceededError, InputError
from posttrain.domain.harnesses import PACKAGES, Harness, Task
from posttrain.domain.jobs import Note
from posttrain.domain.kinds import RATE, ItemRange
from posttrain.engine.config import HarnessConfig
from posttrain.jobs.bodies.harness import _inspect as of_inspect, _lm_eval as of_lm_eval, unpacked, write_results
from posttrain.jobs.bodies.served import ServedModel
from posttrain.jobs.entry import Job
from posttrain.sandbox.program import ProgramError

HOW = {"acc": "mean", "rouge1": "mean", "bleu": "bleu"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness_folder import harness_folder  # noqa: E402

FACTS = Harness("lm-eval", "0.4.13", "", {}, {"sums": Task("1", 3, HOW)}, {"all": ["sums"]})
STAMP = "2026-01-01T00-00-00.000000"
VALUES = {"acc": [0.0, 1.0, 1.0], "rouge1": [0.25, 0.5, 1.0], "bleu": [[1, 2]] * 3}


def results(folder: Path, name: str = "sums", values: dict[str, list[Any]] | None = None) -> Path:
    """Files of lm-eval in a folder."""
    values = VALUES if values is None else values
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            **{"doc_id": at, "doc_hash": hashlib.sha256(bytes([at])).hexdigest(), "filter": "none", "target": "1"},
            **{"arguments": {f"gen_args_{n}": {"arg_0": f"Q: {at}", "arg_1": f" {n}"} for n in range(2)}},
            **{"resps": [[["-2.0", "False"]], [["-1.0", "True"]]], "filtered_resps": [], "metrics": list(values)},
            **{metric: values[metric][at] for metric in values},
        }
        for at in range(len(next(iter(values.values()))))
    ]
    listed = [{"metric": metric, "aggregation": HOW[metric]} for metric in values]
    whole = {
        "results": {name: {f"{metric},none": 0.5 for metric in values}},
        "configs": {name: {"metric_list": listed}},
        "n-samples": {name: {"effective": len(rows), "original": len(rows)}},
    }
    (folder / f"results_{STAMP}.json").write_text(json.dumps(whole))
    (folder / f"samples_{name}_{STAMP}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def written(folder: Path, **settings: Any) -> tuple[dict[str, float], list[str]]:
    """The means, and what was reported."""
    said: list[Any] = []
    job = cast("Job", SimpleNamespace(folder=folder, sink=said.append))
    (folder / "outputs").mkdir(exist_ok=True)
    config = HarnessConfig(model="base", harness="lm-eval", **settings)
    means = write_results(job, config, FACTS, folder / "left", lambda _: {})
    return means, [one.message for one in said if isinstance(one, Note)]


def test_means_become_items_and_others_are_reported(tmp_path: Path) -> None:
    results(tmp_path / "left")
    means, said = written(tmp_path, tasks=("all",), ranges={"sums/rouge1": (0, 1)})
    assert means == {"sums/acc": pytest.approx(2 / 3), "sums/rouge1": pytest.approx(1.75 / 3), "sums/bleu": 0.5}
    assert said == [
        "sums/bleu 0.5: no gate can judge it: it is not the mean of one value per document (aggregation: bleu)"
    ]
    rows = pyarrow.parquet.read_table(tmp_path / "outputs" / "metrics.parquet").to_pylist()
    assert {(row["metric"], row["binary"], row["low"], row["high"]) for row in rows} == {
        ("sums/acc", True, 0, 1), ("sums/rouge1", False, 0, 1),
    }  # fmt: skip
    assert [row["value"] for row in rows] == [*VALUES["acc"], *VALUES["rouge1"]]
    items = pyarrow.parquet.read_table(tmp_path / "outputs" / "items.parquet").to_pylist()
    told = [(row["prompt"], row["response"], row["answer"], row["correct"]) for row in items]
    assert told == [("Q: 0", " 1", " 1", False), ("Q: 1", " 1", " 1", True), ("Q: 2", " 1", " 1", True)]


@pytest.mark.parametrize(
    ("values", "settings", "told"),
    [
        ({**VALUES, "acc": [0.0, 1.0]}, {}, "must have 3 documents, got 2"),
        ({**VALUES, "acc": [0.0, 1.0, 7.0]}, {}, "sums/acc: must be 0 or 1, got 7 for doc 2"),
        ({**VALUES, "acc": [0.0, 1.0, None]}, {}, "sums/acc: must have a value for each item"),
        ({**VALUES, "acc": [0.0, 1.0, float("nan")]}, {}, "sums/acc: has no value for doc 2"),
        ({"acc": VALUES["acc"], "rouge1": VALUES["rouge1"]}, {}, "results of sums/bleu are missing"),
        (VALUES, {"ranges": {"sums/rouge1": (0, 0.5)}}, "sums/rouge1: must be within 0 and 0.5, got 1 for doc 2"),
        (VALUES, {"limit": 2}, "results of sums must have 2 documents, got 3"),
    ],
)  # fmt: skip
def test_results_that_are_refused(
    tmp_path: Path, values: dict[str, list[Any]], settings: dict[str, Any], told: str
) -> None:
    results(tmp_path / "left", values=values)
    with pytest.raises(ProgramError, match=told):
        written(tmp_path, **settings)
    assert not list((tmp_path / "outputs").iterdir())


def test_results_of_other_tasks_twice_or_none(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="lm-eval left no results"):
        written(tmp_path)
    left = results(tmp_path / "left")
    samples = left / f"samples_sums_{STAMP}.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(ProgramError, match="each document must occur once for a filter, got doc 2 twice"):
        written(tmp_path)
    samples.unlink()
    with pytest.raises(ProgramError, match="results of sums must have 3 documents, got 0"):
        written(tmp_path)
    results(tmp_path / "left", name="other")
    with pytest.raises(ProgramError, match="results of other/acc belong to no task of the stage"):
        written(tmp_path)


def test_metrics_of_a_plan() -> None:
    assert FACTS.metrics((), {}) == {"sums/acc": RATE, "sums/rouge1": None, "sums/bleu": None}
    assert FACTS.metrics(("all",), {"sums/rouge1": (0, 1)})["sums/rouge1"] == ItemRange(0, 1)
    for tasks, ranges, told in (
        (("sum",), {}, r"tasks: 'sum' was not fetched \(did you mean 'sums'\?\)"),
        ((), {"sums/bleu": (0, 1)}, "'sums/bleu' is not the mean of one value per item"),
        ((), {"sums/f1": (0, 1)}, "'sums/f1' is no metric of these tasks"),
        ((), {"sums/acc": (0, 2)}, "'sums/acc' is declared as 0 to 1, got 0 to 2"),
        (("all", "sums"), {}, "'sums' is in two of all, sums"),
    ):
        with pytest.raises(InputError, match=told):
            FACTS.metrics(tasks, cast("dict[str, tuple[float, float]]", ranges))


GIVEN = FACTS.to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 9}, {"program": "other"}, {"tasks": {}}, {"groups": None}, {"groups": {"g": ["nope"]}},
        {"tasks": {"--model": GIVEN["tasks"]["sums"]}}, {"tasks": {"a,b": GIVEN["tasks"]["sums"]}},
        *({"tasks": {"sums": {**GIVEN["tasks"]["sums"], **one}}} for one in (
            {"metrics": ["acc"]}, {"metrics": {"acc": ["mean"]}}, {"documents": "3"}, {"documents": 0},
            {"documents": True}, {"source": "--x"}, {"version": 3},
        )),
    ],
)  # fmt: skip
def test_facts_of_another_form_are_refused(change: dict[str, Any]) -> None:
    assert Harness.from_json(json.loads(json.dumps(GIVEN)), "here") == FACTS
    with pytest.raises(InputError, match="here: must have the facts of a harness"):
        Harness.from_json({**GIVEN, **change}, "here")


def test_only_the_programs_own_parameters(tmp_path: Path) -> None:
    FACTS.refuse_foreign({"num_fewshot": 2, "temperature": 0.0})
    with pytest.raises(InputError, match="temperature: lm-eval does not read it"):
        FACTS.refuse_foreign({"temperature": 0.5})


def test_unpacked_packages_are_those_of_the_archive(tmp_path: Path) -> None:
    """They are compared on every use, because other programs can write in a cache."""
    folder = harness_folder(tmp_path / "harness", tmp_path)
    blob = SimpleNamespace(digest="sha256:" + "a" * 64)
    order = SimpleNamespace(inputs={"harness": blob}, cache_dir=str(tmp_path / "cache"))
    job = cast("Job", SimpleNamespace(order=order, input=lambda slot: folder, label=lambda slot: "harness:x@1"))
    site = unpacked(job)
    main = site / "lm_eval" / "__main__.py"
    data, made = main.read_bytes(), main.stat().st_ino
    assert unpacked(job) == site
    assert main.stat().st_ino == made
    for damage in (
        lambda: main.write_bytes(data[:-1]), main.unlink, lambda: (site / "json.py").write_text("evil"),
        lambda: shutil.rmtree(site),
    ):  # fmt: skip
        damage()
        unpacked(job)
        assert main.read_bytes() == data
        assert not (site / "json.py").exists()
    (folder / PACKAGES).write_bytes(b"no archive")
    with pytest.raises(InputError, match="cannot be unpacked"):
        unpacked(job)


def served(limit: int | None) -> tuple[Any, list[tuple[int, int]], list[int]]:
    """A served model without a process, what it records (spent, reserved), and what it grants."""
    records, grants = list[tuple[int, int]](), list[int]()
    made = object.__new__(ServedModel)
    order = SimpleNamespace(tokens_declared=None)
    made._job = cast("Job", SimpleNamespace(order=order, meter=lambda spent, held: records.append((spent, held))))
    made._limit, made._budgeted, made._error = limit, True, None
    made.tokens = made.answered = made._granted = made._reserved = 0
    made._process = cast("Any", SimpleNamespace(poll=lambda: None))
    made._tell = lambda line: grants.append(line["granted"])  # type: ignore[method-assign]
    return made, records, grants


def report(spent: int, held: int, wanted: int) -> dict[str, Any]:
    return {"spent": spent, "held": held, "wanted": wanted, "answered": 0, "refused": ""}


def test_grants_are_recorded_first_never_fall_and_stay_in_the_budget() -> None:
    made, records, grants = served(100_000)
    made._take(report(0, 0, 90_000))
    made._take(report(0, 0, 5))  # written before the first grant arrived
    assert grants == [100_000]
    assert records[0] == (0, 100_000)
    made._take(report(10, 99_000, 2_000))  # answers in progress may spend less than they can
    made.check()
    made._take(report(99_000, 0, 2_000))
    with pytest.raises(BudgetExceededError, match="the next answer"):
        made.check()
    assert max(spent + held for spent, held in records) <= 100_000


def test_without_a_budget_everything_is_counted() -> None:
    made, records, grants = served(None)
    made._take(report(10, 20, 0))
    assert (records, grants) == ([(10, 20)], [])


def test_every_parameter_is_in_the_command(tmp_path: Path) -> None:
    def words(program: Any, *more: Any, facts: Harness = FACTS, **params: Any) -> str:
        return " ".join(program(HarnessConfig(model="base", harness="x", **params), facts, *more))

    server = SimpleNamespace(url="http://127.0.0.1:5", facts={"context": 512})
    usual = words(of_lm_eval, server, False)
    assert "--tasks sums " in usual
    assert "max_length=512,add_bos_token=False,max_gen_toks=256," in usual
    assert not {"--limit", "--num_fewshot", "--apply_chat_template", "--include_path"} & set(usual.split())
    told = words(
        of_lm_eval, server, True, tasks=("all", "all"), limit=7, num_fewshot=0, chat=True, add_bos_token=True,
        max_length=64, max_new_tokens=9, timeout=30,
    )  # fmt: skip
    assert "max_length=64,add_bos_token=True,max_gen_toks=9,max_retries=3,timeout=30 --tasks all " in told
    assert told.endswith("--include_path {source}/tasks --limit 7 --num_fewshot 0 --apply_chat_template")
    task, packaged = Task("1", 3, {"match": "letters"}, "a.py@sums"), Task("1", 3, {"match": "letters"}, "own/sums")
    facts = Harness("inspect", "0.3.285", "", {}, {"sums": task, "own/sums": packaged})
    for tasks, sources in (
        ((), "a.py@sums own/sums"), (("own/sums",), "own/sums"), (("a.py",), "a.py@sums"),
        (("a.py@sums",), "a.py@sums"),
    ):  # fmt: skip
        assert f"inspect_ai eval {sources} --model" in words(of_inspect, facts=facts, tasks=tasks)
    told = words(of_inspect, facts=facts, limit=7, max_new_tokens=9, temperature=0.5)
    assert told.endswith("--seed 0 --max-tokens 9 --temperature 0.5 --limit 7")


def test_a_metric_with_a_filter_can_have_a_range() -> None:
    name = "sums/rouge1,strip"
    facts = Harness("lm-eval", "0.4.13", "", {}, {"sums": Task("1", 3, {"rouge1,strip": "mean"})})
    config = HarnessConfig(model="base", harness="x", ranges={name: (0, 2)})
    assert facts.metrics((), config.ranges) == {name: ItemRange(0, 2)}
