"""`posttrain gate check`: verdicts on results of evaluations elsewhere, without a workspace.

The files in fixtures/evaluations were written by lm-eval 0.4.13 (a random model of 37,000 parameters) and Inspect
0.3.285 (a scripted model). Of lm-eval's files, the arguments of requests and the description of the machine were
removed; of Inspect's JSON log, the events and messages.
"""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from cli_world import ITEMS, RUN, World, make_world
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from documents import ROOT, fences

from posttrain.app.workspace import open_workspace
from posttrain.cli.main import app

FIXTURES = Path(__file__).parent / "fixtures" / "evaluations"
LM_EVAL, TWO_EPOCHS, ONE_EPOCH = (
    FIXTURES / name for name in ("lm_eval", "inspect_two_epochs.eval", "inspect_one_epoch.json")
)
ACCURACY = {"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.8}
COMPARED = {"name": "no-regression", "metric": "heldout/accuracy", "not_worse_than": "base", "margin": 0.05}
MORE = """\
  - {name: tokens, metric: heldout/response_tokens, at_most: 40}
  - {name: shorter, metric: heldout/response_tokens, direction: lower,
     better_than: channel, by: 1, if_channel_empty: pass}
  - {name: far, metric: heldout/accuracy, better_than: channel, by: 0.5, if_channel_empty: pass}
  - {name: sampled, metric: heldout/sampled_accuracy, at_least: 0.3, confidence: 0.9}
release:"""
Row = tuple[str, str, float | None, bool, float | None, float | None]  # metric, item, value, binary, low, high


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run commands in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rated(right: int, items: int = 100, metric: str = "heldout/accuracy") -> list[Row]:
    """Rows of a rate."""
    return [(metric, f"i{number}", float(number < right), True, 0.0, 1.0) for number in range(items)]


def table(name: str, rows: list[Row]) -> str:
    """The name of a file with these rows."""
    columns = zip(*rows, strict=True)
    names = ("metric", "item_id", "value", "binary", "low", "high")
    pq.write_table(pa.table(dict(zip(names, map(list, columns), strict=True))), name)
    return name


def gates(*rules: Mapping[str, Any], **rest: Any) -> str:
    """The name of a file with these gates."""
    Path("gates.yaml").write_text(yaml.safe_dump({"gates": list(rules), **rest}))
    return "gates.yaml"


def check(*words: object) -> Any:
    return CliRunner().invoke(app, ["gate", "check", *map(str, words)])


def judged(*words: object, code: int = 0) -> dict[str, Any]:
    """The JSON of a command that ends with this code."""
    done = check(*words, "-o", "json")
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(*words: object, code: int = 2) -> str:
    """The line of a command that judges nothing and writes nothing."""
    before = sorted(Path().rglob("*"))
    done = check(*words)
    line = str(done.stderr).strip()
    assert done.exit_code == code, (done.exit_code, line, done.stdout)
    assert line.startswith("error: "), line
    assert len(line.splitlines()) == 1, line
    assert ";" in line, "a next action"
    assert done.stdout == ""
    assert sorted(Path().rglob("*")) == before
    return line


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "code", "word"), [(95, 0, "PASS"), (82, 4, "INCONCLUSIVE"), (60, 3, "FAIL")], ids=["pass", "open", "fail"]
)
def test_the_exit_code_is_that_of_the_worst_gate(folder: Path, right: int, code: int, word: str) -> None:
    done = check(gates(ACCURACY), "--results", table("results.parquet", rated(right)))
    assert done.exit_code == code, done.stderr
    assert f"accuracy         {word}" in done.stdout
    assert f"heldout/accuracy is {right / 100:g} on 100 items" in done.stdout
    assert ("error: 1 of 1 gates" in done.stderr) == bool(code)
    assert sorted(path.name for path in folder.iterdir()) == ["gates.yaml", "results.parquet"], "no workspace"


def test_the_verdicts_are_those_of_a_gate_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs are judged by the control plane, and their results again by the command; every number is equal."""
    run = RUN.replace("release:", MORE).replace(
        "{data: heldout}}}", "{data: heldout, samples: 4, max_new_tokens: 64}}}"
    )
    monkeypatch.setattr("cli_world.metrics_table", _measured)
    world = make_world(tmp_path, monkeypatch)
    world.prepare(by_commands=True)
    world.write("run.yaml", run)
    first, second = _judged_run(world, "17"), _judged_run(world, "18")
    shutil.rmtree(tmp_path / ".posttrain")
    rules = [{**rule, **_based(rule)} for rule in yaml.safe_load(run)["gates"]]
    for rule in rules:
        rule.pop("if_channel_empty", None)
    found = judged(gates(*rules, seed=18), "--results", second[1], "--against", first[1], code=3)
    own = {"reason", "baseline", "against", "look"}
    assert {one["outcome"] for one in second[0]} == {"pass", "inconclusive", "fail"}
    assert sum(one["difference"] is not None for one in second[0]) == 3
    assert [_without(one, own) for one in found["report"]["verdicts"]] == [_without(one, own) for one in second[0]]
    outputs = tmp_path / "outputs"  # as an evaluation writes them
    outputs.mkdir()
    shutil.copy(second[1], outputs / "metrics.parquet")
    pq.write_table(pa.table({"response": ["4"]}), outputs / "items.parquet")
    again = judged(gates(*rules, seed=18), "--results", outputs, "--against", first[1], code=3)
    assert [_without(one, own) for one in again["report"]["verdicts"]] == [_without(one, own) for one in second[0]]
    (outputs / "metrics.parquet").rename(outputs / "items.parquet")  # no file is left out without the other
    judged(gates(*rules, seed=18), "--results", outputs, "--against", first[1], code=3)
    other = judged(gates(*rules, seed=19), "--results", second[1], "--against", first[1], code=3)
    assert other["report"]["verdicts"] != found["report"]["verdicts"], "the seed of Gaffke's limit is used"


def _measured(right: int, first: int = 0) -> bytes:
    draw = random.Random(right)
    rows: list[Row] = []
    for item in range(ITEMS):
        name = f"i{first + item}"
        rows.append(("heldout/accuracy", name, float(item < right), True, 0.0, 1.0))
        rows.append(("heldout/response_tokens", name, draw.randint(5, 30) - 0.1 * right + 20, False, 1.0, 64.0))
        rows.append(("heldout/sampled_accuracy", name, draw.randint(1, 4) / 4, False, 0.0, 1.0))
    sink = io.BytesIO()
    names = ("metric", "item_id", "value", "binary", "low", "high")
    pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), sink)
    return sink.getvalue()


def _judged_run(world: World, seed: str) -> tuple[list[dict[str, Any]], Path]:
    """The verdicts of a run's gate stage, and a file with its measurements."""
    world.write("reward.py", f"def score(completion, answer):\n    return 0.{95 + (seed == '18')}\n")
    world.ok("asset", "add", "reward:sort", "reward.py")
    done = world("run", "run.yaml", "--seed", seed)
    assert done.exit_code == (0 if seed == "17" else 3), (done.stdout, done.stderr)
    shown = world.json("why", world.newest())
    workspace = open_workspace(world.root)
    stage = next(one for one in workspace.ledger.stages(world.newest()) if one.name == "evaluate")
    path = world.root / f"metrics-{seed}.parquet"
    path.write_bytes(workspace.blobs.get(stage.outputs["metrics"]["digest"]))
    workspace.close()
    return shown["gates"]["verdicts"], path


def _based(rule: Mapping[str, Any]) -> dict[str, str]:
    return {key: "base" for key in ("not_worse_than", "better_than") if key in rule}


def _without(verdict: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in verdict.items() if key not in keys}


def test_the_page_of_the_documentation_shows_what_the_command_prints() -> None:
    (shown,) = fences(ROOT / "docs" / "howto" / "gate-check.md", "text")
    rule = {"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.9}
    assert check(gates(rule), "--results", table("results.parquet", rated(190, 200))).stdout == shown


def test_several_files_are_one_set_of_results() -> None:
    files = [table("a.parquet", rated(95)), table("b.parquet", rated(90, metric="other/accuracy"))]
    rules = [ACCURACY, {**ACCURACY, "name": "other", "metric": "other/accuracy"}]
    found = judged(gates(*rules), "--results", files[0], "--results", files[1])
    assert [one["estimate"] for one in found["report"]["verdicts"]] == [0.95, 0.9]
    assert [one["file"] for one in found["results"]] == files
    Path("both").mkdir()
    shutil.move("a.parquet", "both/a.parquet")
    shutil.move("b.parquet", "both/b.parquet")
    assert judged("gates.yaml", "--results", "both")["report"] == found["report"], "digests do not depend on paths"


def test_results_against_which_no_gate_compares_are_noted() -> None:
    results = table("results.parquet", rated(95))
    assert "--against was not used" in check(gates(ACCURACY), "--results", results, "--against", results).stderr


def test_the_page_has_the_verdicts_and_no_script(folder: Path) -> None:
    results = table("results.parquet", rated(60))
    done = check(gates(ACCURACY), "--results", results, "--page", "gates.html")
    assert done.exit_code == 3
    page = Path("gates.html").read_text()
    assert "heldout/accuracy is 0.6 on 100 items" in page
    assert 'badge bad">fail' in page
    assert "results.parquet" in page
    assert "<script" not in page
    assert "http-equiv" in page
    check(
        gates({"name": "acc", "metric": "tiny_mc/acc", "at_least": 0.1}), "--results", LM_EVAL, "--page", "gates.html"
    )
    assert "tiny_ppl/word_perplexity" in Path("gates.html").read_text()
    before = sorted(folder.iterdir())
    assert check("gates.yaml", "--results", LM_EVAL, "--page", "nowhere/gates.html").exit_code == 10
    assert sorted(folder.iterdir()) == before
    for read in ("gates.yaml", results):
        kept = Path(read).read_bytes()
        done = check(gates(ACCURACY), "--results", results, "--page", read)
        assert done.exit_code == 2
        assert "must be the name of an .html file" in done.stderr
        assert Path(read).read_bytes() == kept or read == "gates.yaml"


def test_the_command_imports_no_engine_and_makes_no_workspace(folder: Path) -> None:
    results = table("results.parquet", rated(95))
    program = (
        "import sys; from posttrain.cli.main import main\n"
        f"sys.argv[1:] = ['gate', 'check', {gates(ACCURACY)!r}, '--results', {results!r}, '--page', 'p.html']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'lm_eval', 'inspect_ai', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "accuracy         PASS" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["gates.yaml", "p.html", "results.parquet"]


# --- lm-eval ----------------------------------------------------------------------------------------------------------


def samples(task: str, of: Path = LM_EVAL) -> list[dict[str, Any]]:
    (path,) = of.glob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def results_of(of: Path = LM_EVAL) -> dict[str, Any]:
    (path,) = of.glob("results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def copied(name: str, task: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Path:
    """A copy of lm-eval's folder with other samples of a task."""
    shutil.copytree(LM_EVAL, name)
    (path,) = Path(name).glob(f"samples_{task}_*.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in change(samples(task))))
    return Path(name)


def test_means_of_lm_eval_are_judged_by_document() -> None:
    rules = [
        {"name": "acc", "metric": "tiny_mc/acc", "at_least": 0.1},
        {"name": "match", "metric": "tiny_gen/exact_match,strict-match", "at_most": 0.4},
    ]
    found = judged(gates(*rules), "--results", LM_EVAL)
    acc, match = found["report"]["verdicts"]
    rows = samples("tiny_mc")
    by_document = {row["doc_hash"]: row["acc"] for row in rows}
    assert (len(rows), len(by_document)) == (24, 22), "two documents repeat others"
    assert acc["items"] == 22
    assert acc["estimate"] == sum(by_document.values()) / 22
    assert acc["test"].startswith("exact limit of a rate")
    assert sum(row["acc"] for row in rows) / 24 == results_of()["results"]["tiny_mc"]["acc,none"]
    assert match["outcome"] == "pass"
    assert "24 documents are 22 items" in found["notes"][0]
    assert found["results"][0]["format"] == "lm-eval"
    (file,) = LM_EVAL.glob("results_*.json")
    assert judged("gates.yaml", "--results", file)["report"] == found["report"]


def test_other_aggregates_of_lm_eval_are_reported_and_not_judged() -> None:
    found = judged(gates({"name": "acc", "metric": "tiny_mc/acc", "at_least": 0.1}), "--results", LM_EVAL)
    told = {one["metric"]: one for one in found["not_judged"]}
    assert set(told) == {
        *("tiny_mc/f1", "tiny_mc/mcc", "tiny_gen/bleu,strict-match", "tiny_gen/bleu,flexible", "tiny_group/acc"),
        *(f"tiny_ppl/{name}" for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")),
    }
    words, bits = told["tiny_ppl/word_perplexity"], told["tiny_ppl/bits_per_byte"]
    assert math.exp(-words["numerator"] / words["denominator"]) == pytest.approx(words["value"], rel=1e-9)
    assert -bits["numerator"] / bits["denominator"] / math.log(2) == pytest.approx(bits["value"], rel=1e-9)
    assert told["tiny_mc/f1"]["numerator"] is None
    for metric, why in {
        "tiny_ppl/word_perplexity": "aggregation: weighted_perplexity",
        "tiny_gen/bleu,flexible": "aggregation: bleu",
        "tiny_group/acc": "of a group; judge its tasks",
    }.items():
        line = refused(gates({"name": "x", "metric": metric, "at_most": 3}), "--results", LM_EVAL)
        assert f"gates.x: {metric} cannot be judged: it is not the mean of one value per document" in line
        assert why in line


def test_lm_eval_results_without_samples_are_not_judged() -> None:
    shutil.copytree(LM_EVAL, "few")
    next(Path("few").glob("samples_tiny_mc_*")).unlink()
    line = refused(gates({"name": "acc", "metric": "tiny_mc/acc", "at_least": 0.1}), "--results", "few")
    assert "evaluate with --log_samples" in line


def test_models_are_compared_by_document() -> None:
    better = copied("better", "tiny_mc", lambda rows: [{**row, "acc": 1.0} for row in reversed(rows)])
    rules = [{"name": "gain", "metric": "tiny_mc/acc", "better_than": "base", "by": 0.1}]
    (verdict,) = judged(gates(*rules), "--results", better, "--against", LM_EVAL)["report"]["verdicts"]
    wrong = sum(1 - value for value in {row["doc_hash"]: row["acc"] for row in samples("tiny_mc")}.values())
    assert verdict["details"]["only_candidate"] == wrong
    assert verdict["outcome"] == "pass"
    assert verdict["test"].startswith("paired limit of two rates")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(lambda rows: rows[:-3], "must contain 24 documents, as the results state, got 21, e.g. not doc 21",
                     id="few"),
        pytest.param(lambda rows: rows + rows[:1], "each document must occur once for a filter, got doc 0 twice",
                     id="twice"),
        pytest.param(
            lambda rows: [{**row, "doc_hash": f"{row['doc_id']:064d}"} for row in rows],
            "was measured on different items: 46 are not in both, e.g. 'doc 0 (0000000000000000)'",
            id="foreign",
        ),
        pytest.param(
            lambda rows: [{**row, "acc": math.nan} if row["doc_id"] == 7 else row for row in rows],
            "got none or NaN for 1 items",
            id="nan",
        ),
        pytest.param(
            lambda rows: [{**row, "acc": 0.25} for row in rows],
            "must be 0 or 1 for each item, got 0.25 for 'doc 0 (dbbbe0b21ad11679)'; add ranges: {tiny_mc/acc: [0, 1]}",
            id="shares",
        ),
        pytest.param(lambda rows: [{"doc_id": 1}], "line 1: must be a sample of lm-eval 0.4, got KeyError", id="other"),
        pytest.param(
            lambda rows: [{**row, "acc": "yes"} for row in rows], "its values are not numbers, e.g. for doc 0",
            id="text",
        ),
    ],
)  # fmt: skip
def test_damaged_samples_are_refused(change: Callable[[Any], Any], told: str) -> None:
    rule = {"name": "acc", "metric": "tiny_mc/acc", "better_than": "base"}
    damaged = copied("damaged", "tiny_mc", change)
    assert told in refused(gates(rule), "--results", LM_EVAL, "--against", damaged)
    absolute = {"name": "acc", "metric": "tiny_mc/acc", "at_least": 0.1}
    if "different items" not in told:
        assert told in refused(gates(absolute), "--results", damaged)


def test_a_declared_range_replaces_that_of_a_rate() -> None:
    shares = copied("shares", "tiny_mc", lambda rows: [{**row, "acc": 0.5 + row["acc"] / 4} for row in rows])
    rule = {"name": "acc", "metric": "tiny_mc/acc", "at_least": 0.3}
    (verdict,) = judged(gates(rule, ranges={"tiny_mc/acc": [0, 1]}), "--results", shares)["report"]["verdicts"]
    assert verdict["test"].startswith("bounded-mean limit")


# --- Inspect ----------------------------------------------------------------------------------------------------------


def test_scores_of_inspect_are_means_over_epochs() -> None:
    rules = [{"name": name, "metric": f"sums/{name}", "at_least": 0.2} for name in ("match", "graded")]
    words = {"name": "words", "metric": "sums/parts/words", "at_most": 5}
    file = gates(*rules, words, ranges={"sums/parts/words": [0, 10]})
    for log, told in ((TWO_EPOCHS, None), (ONE_EPOCH, json.loads(ONE_EPOCH.read_text())["results"]["scores"])):
        found = judged(file, "--results", log)
        assert found["results"][0]["format"] == "inspect"
        verdicts = {one["gate"]: one for one in found["report"]["verdicts"]}
        assert {one["items"] for one in verdicts.values()} == {22}
        means = {one["name"]: one["metrics"].get("accuracy", one["metrics"].get("mean"))["value"] for one in told or ()}
        # as Inspect printed them for the log with two epochs
        means = means or {"match": 17 / 22, "graded": 16 / 22, "words": 20 / 11}
        assert {name: one["estimate"] for name, one in verdicts.items()} == pytest.approx(
            {name: means[name] for name in verdicts}
        )
    assert judged(file, "--results", TWO_EPOCHS, "--against", ONE_EPOCH)["notes"]


def test_logs_of_both_forms_are_compared_by_sample() -> None:
    rule = {"name": "same", "metric": "sums/graded", "not_worse_than": "base", "margin": 0.5}
    (verdict,) = judged(gates(rule), "--results", TWO_EPOCHS, "--against", ONE_EPOCH)["report"]["verdicts"]
    assert verdict["items"] == 22
    assert verdict["difference"] == pytest.approx(16 / 22 - 11.5 / 22)


def logged(change: Callable[[dict[str, Any]], object]) -> str:
    """The name of a changed JSON log."""
    log = json.loads(ONE_EPOCH.read_text())
    change(log)
    Path("changed.json").write_text(json.dumps(log))
    return "changed.json"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(lambda log: log.update(status="error"), "of a successful evaluation, got status 'error'",
                     id="status"),
        pytest.param(lambda log: log.update(invalidated=True), "got status 'success', invalidated", id="invalidated"),
        pytest.param(lambda log: log["samples"].pop(), "must contain 22 samples, got 21", id="few"),
        pytest.param(
            lambda log: log["samples"].__setitem__(3, log["samples"][2]), " twice in epoch 1", id="twice",
        ),
        pytest.param(lambda log: log["samples"][4].update(scores=None), "none or NaN for 1 items", id="no score"),
        pytest.param(
            lambda log: log["samples"][4].update(input="9+9?"), "2 are not in both, e.g. 's", id="other text"
        ),
        pytest.param(
            lambda log: log["samples"][4].update(id="new"), "2 are not in both, e.g. 'new (", id="other id"
        ),
        pytest.param(
            lambda log: log["samples"][4]["scores"]["match"].update(value="good"),
            "its values are not numbers, e.g. for sample s", id="text",
        ),
        pytest.param(lambda log: log.pop("samples"), "must contain 22 samples, got 0", id="no samples"),
        pytest.param(lambda log: log["samples"][0].pop("id"), "must have the fields of lm-eval 0.4 or Inspect",
                     id="other"),
    ],
)  # fmt: skip
def test_damaged_logs_are_refused(change: Callable[[dict[str, Any]], object], told: str) -> None:
    rule = {"name": "same", "metric": "sums/match", "not_worse_than": "base", "margin": 0.3}
    assert told in refused(gates(rule), "--results", logged(change), "--against", ONE_EPOCH)


def test_a_log_is_not_unpacked_if_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"name": "match", "metric": "sums/match", "at_least": 0.3}
    monkeypatch.setattr("posttrain.foreign.evaluations._MOST", 1000)
    assert "header.json must have at most 1000 bytes" in refused(gates(rule), "--results", TWO_EPOCHS)
    assert "must have from 1 to 1000 bytes" in refused("gates.yaml", "--results", ONE_EPOCH)


def test_a_log_that_hides_its_size_is_refused() -> None:
    """The central directory states a small size, but the data unpack to more."""
    packed = bytearray(TWO_EPOCHS.read_bytes())
    with zipfile.ZipFile(TWO_EPOCHS) as archive:
        size = archive.getinfo("summaries.json").file_size
    at = packed.rindex(b"summaries.json") - 46  # the entry in the central directory
    assert packed[at : at + 4] == b"PK\x01\x02"
    packed[at + 24 : at + 28] = (size // 2).to_bytes(4, "little")
    Path("lying.eval").write_bytes(packed)
    rule = {"name": "match", "metric": "sums/match", "at_least": 0.3}
    assert "summaries.json is damaged" in refused(gates(rule), "--results", "lying.eval")
    packed[at + 6] = 250  # the version of the ZIP format
    Path("new.eval").write_bytes(packed)
    assert "got NotImplementedError: zip file version 25.0" in refused(gates(rule), "--results", "new.eval")


def test_an_older_log_without_zstandard_is_read() -> None:
    log = json.loads(ONE_EPOCH.read_text())
    with zipfile.ZipFile("old.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("summaries.json", json.dumps(log.pop("samples")))
        archive.writestr("header.json", json.dumps(log))
    rule = {"name": "match", "metric": "sums/match", "at_least": 0.3}
    (verdict,) = judged(gates(rule), "--results", "old.eval")["report"]["verdicts"]
    assert verdict["estimate"] == pytest.approx(18 / 22)


# --- bad input --------------------------------------------------------------------------------------------------------


def one(form: str) -> str:
    """A file with one gate."""
    return f"gates: [{{name: a, metric: heldout/accuracy{form and ', '}{form}}}]\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gates: [", "is not YAML"),
        ("[]", "must be a map of keys"),
        ("gates: []", "gates: "),
        ("{}", "gates: is required"),
        (one("at_lest: 0.5"), "unknown key (did you mean 'at_least'?)"),
        (one("at_least: 0.5") + "rangs: {}", "unknown key (did you mean 'ranges'?)"),
        (one(""), "exactly one of at_least"),
        (one("at_least: 90"), "gates.a: at_least must be a value that a model can reach, got 90"),
        (one("at_least: 0"), "gates.a: at_least must be a value that a model can miss"),
        (one("not_worse_than: channel, margin: 0.1"), "got channel, which only a workspace has"),
        (one("better_than: base"), "add --against FILE"),
        (one("at_least: 0.5").replace("accuracy", "acuracy"),
         "(did you mean 'heldout/accuracy'?) (available: heldout/accuracy)"),
        (one("at_least: 0.5").replace("]", ", {name: a, metric: heldout/accuracy, at_most: 0.9}]"),
         "names must be unique"),
        (one("at_least: 0.5") + "ranges: {heldout/accuracy: [0, 2]}",
         "must be the range that results.parquet declares"),
        (one("at_least: 0.5") + "ranges: {heldout/acc: [0, 2]}", "ranges: must name metrics of --results"),
        (one("at_least: 0.5") + "ranges: {heldout/accuracy: [2, 0]}", "must be rate, or the least and the greatest"),
    ],
)  # fmt: skip
def test_a_bad_file_of_gates_is_refused(text: str, told: str) -> None:
    Path("gates.yaml").write_text(text)
    done = check("gates.yaml", "--results", table("results.parquet", rated(95)))
    assert done.exit_code == 2, (done.stdout, done.stderr)
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_gates_of_one_file_compare_with_one_model() -> None:
    results = table("results.parquet", rated(95))
    other = {**COMPARED, "name": "other", "not_worse_than": "sft"}
    line = refused(gates(COMPARED, other), "--results", results, "--against", results)
    assert "got base and sft; use a file for each" in line
    channel = {**COMPARED, "not_worse_than": "channel"}
    line = refused(gates(channel), "--results", results, "--against", results)
    assert "got channel, which only a workspace has; write base, and give the released model's results" in line


def changed(place: int, **values: Any) -> list[Row]:
    """Rows with other values in one row."""
    names = ("metric", "item_id", "value", "binary", "low", "high")
    rows = rated(95)
    rows[place] = tuple(values.get(name, old) for name, old in zip(names, rows[place], strict=True))  # type: ignore[assignment]
    return rows


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        pytest.param(changed(3, value=math.nan), "got none or NaN for 1 items of other.parquet, e.g. 'i3'", id="nan"),
        pytest.param(changed(3, value=None), "got none or NaN for 1 items of other.parquet, e.g. 'i3'", id="null"),
        pytest.param(changed(3, value=0.5), "declared binary but has values other than 0 and 1", id="binary"),
        pytest.param(
            [(m, i, 3.0, False, lo, hi) for m, i, _, _, lo, hi in rated(95)],
            "has the declared range 0 to 1, got 3 on 'i0'", id="range",
        ),
        pytest.param(changed(3, item_id="i4"), "1 item ids more than once, e.g. 'i4'", id="twice"),
        pytest.param(changed(3, low=-1.0), "must declare the same range on all its items", id="two ranges"),
        pytest.param([(m, i, v, b, None, None) for m, i, v, b, *_ in rated(95)], "needs the range of an item's value",
                     id="no range"),
        pytest.param(changed(3, item_id=None), "metric and item_id must be text, got None", id="no id"),
        pytest.param(rated(95, metric="other/accuracy"), "(available: other/accuracy)", id="metric"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused(rows: list[Row], told: str) -> None:
    assert told in refused(gates(ACCURACY), "--results", table("other.parquet", rows))
    if "more than once" not in told:
        good = table("good.parquet", rated(95))
        assert told in refused(gates(COMPARED), "--results", good, "--against", table("other.parquet", rows))


def test_items_of_both_models_must_be_the_same() -> None:
    good = table("good.parquet", rated(95))
    for name, rows, told in (
        ("missing", rated(95)[:-1], "1 are not in both, e.g. 'i99'"),
        ("foreign", changed(3, item_id="x"), "2 are not in both, e.g. 'i3'"),
        ("doubled", [*rated(95), rated(95)[0]], "1 item ids more than once, e.g. 'i0'"),
    ):
        other = table(f"{name}.parquet", rows)
        assert told in refused(gates(COMPARED), "--results", good, "--against", other)
        assert told in refused(gates(COMPARED), "--results", other, "--against", good)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "must have from 1 to"),
        (b"PAR1", "cannot be read as Parquet"),
        (b"PAR1" + bytes(90), "cannot be read as Parquet"),
        (b"PK\x05\x06" + bytes(18), "got a ZIP file without header.json"),
        (b"PK\x03\x04" + bytes(30), "is not JSON or is cut off"),
        (b"\xff\xfe\x00", "is not JSON or is cut off"),
        (b"{", "is not JSON or is cut off"),
        (b"[" * 100_000, "is not JSON or is cut off"),
        (b"[1]", "must be metrics.parquet of Posttrain"),
        (b'{"a": 1}', "must be metrics.parquet of Posttrain"),
        (b'{"results": {"t": {"acc,none": 1}}, "configs": {"t": {}}}', "(available: none)"),
        (b'{"results": {"t": []}, "configs": {}}', "must have the fields of lm-eval 0.4"),
        (b'{"doc_id": 0, "doc_hash": "a"}\n{"doc_id": 1, "doc_hash": "b"}\n', "give the results_….json next to it"),
        (b'{"eval": {}, "status": "success"}', "must have the fields of lm-eval 0.4 or Inspect 0.3"),
    ],
)  # fmt: skip
def test_files_that_are_no_results_are_refused(data: bytes, told: str) -> None:
    Path("results").write_bytes(data)
    assert told in refused(gates(ACCURACY), "--results", "results")


def test_missing_files_and_columns_are_refused() -> None:
    assert "nowhere" in refused(gates(ACCURACY), "--results", "nowhere")
    assert "nowhere.yaml" in refused("nowhere.yaml", "--results", "nowhere")
    Path("empty").mkdir()
    assert "got a folder without" in refused("gates.yaml", "--results", "empty")
    pq.write_table(pa.table({"metric": ["heldout/accuracy"], "value": [1.0]}), "few.parquet")
    assert "got no item_id; add it" in refused("gates.yaml", "--results", "few.parquet")
    rows = {
        "metric": ["heldout/accuracy"],
        "item_id": ["a"],
        "value": ["x"],
        "binary": [True],
        "low": [0.0],
        "high": [1.0],
    }
    pq.write_table(pa.table(rows), "text.parquet")
    assert "values must be numbers" in refused("gates.yaml", "--results", "text.parquet")
    good = table("good.parquet", rated(95))
    line = refused("gates.yaml", "--results", good, "--results", good)
    assert "got heldout/accuracy here and in good.parquet" in line


def test_a_page_never_replaces_what_is_no_page(tmp_path: Path) -> None:
    table("good.parquet", rated(95))
    gates(ACCURACY)
    said = refused("gates.yaml", "--results", "good.parquet", "--page", "good.parquet")
    assert "must be the name of an .html file" in said
    Path("samples.jsonl").write_text("{}")
    assert ".html" in refused("gates.yaml", "--results", "good.parquet", "--page", "samples.jsonl")
    assert Path("samples.jsonl").read_text() == "{}"


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED])
def test_a_log_that_unpacks_to_more_than_it_declares_is_refused(method: int) -> None:
    with zipfile.ZipFile("bomb.eval", "w", method) as archive:
        archive.writestr("header.json", b" " * (64 << 20))
    data = bytearray(Path("bomb.eval").read_bytes())
    at = data.rindex(b"PK\x01\x02") + 24  # the size in the central directory
    data[at : at + 4] = (100).to_bytes(4, "little")
    Path("bomb.eval").write_bytes(data)
    gates(ACCURACY)
    tracemalloc.start()
    said = refused("gates.yaml", "--results", "bomb.eval")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "damaged" in said
    assert most < 16 << 20
