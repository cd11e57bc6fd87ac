"""A plan refuses rows that the job would refuse, whichever door it is asked through, and writes nothing."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_world import believe_rewards

from posttrain import submit
from posttrain.app.runs import plan, view_plan
from posttrain.app.workspace import init_workspace, open_workspace
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.files import character_tokenizer, initial_model
from posttrain.store.trees import tree_listing

CONTEXT = 32
ROW = {"prompt": [{"role": "user", "content": "Q: sort 31"}], "completion": "A: 13", "answer": "13"}  # 15 + 6 tokens
RUN: dict[str, Any] = {
    "name": "sort",
    "owner": "ada",
    "seed": 1,
    "model": "model:tiny",
    "data": {"train": "train.jsonl", "heldout": "dataset:heldout"},
    "rewards": {"exact": "reward.py"},
    "stages": {
        "sft": {"kind": "sft", "data": "train", "steps": 1},
        "grpo": {
            "kind": "grpo",
            "model": "sft",
            "data": "train",
            "reward": "exact",
            "steps": 1,
            "max_new_tokens": 17,
            "probe": {"data": "heldout", "items": 2},
        },
        "evaluate": {
            "kind": "evaluate",
            "model": "grpo",
            "suites": {"heldout": {"data": "heldout", "max_new_tokens": 17}},
        },
    },
}
LONG = {**ROW, "prompt": [{"role": "user", "content": "Q: sort 312"}]}
Change = Callable[[dict[str, Any]], None]


class Bench:
    """A workspace with a model, a data set and a run file beside it: the copy of one that is made once in a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(_template().name, folder, dirs_exist_ok=True)
        self.workspace = open_workspace(folder)

    def rows(self, name: str, *rows: dict[str, Any]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def heldout(self, *rows: dict[str, Any]) -> None:
        self.workspace.catalog.add_dataset(self.rows("heldout", *rows), "heldout")

    def file(self, change: Change = lambda raw: None) -> Path:
        raw = copy.deepcopy(RUN)
        change(raw)
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    def refused(self, change: Change = lambda raw: None) -> str:
        """What a submit is refused with; it leaves nothing."""
        blobs = [path for path in (self.workspace.root / "blobs").rglob("*") if path.is_file()]
        with pytest.raises(InputError) as caught:
            submit(self.file(change), workspace=self.workspace)
        assert self.workspace.ledger.runs() == []
        assert [path for path in (self.workspace.root / "blobs").rglob("*") if path.is_file()] == blobs
        return str(caught.value).removeprefix(f"{self.folder}/run.yaml: ")


@functools.cache
def _template() -> tempfile.TemporaryDirectory[str]:
    """A workspace that nobody works in; it removes itself at the end."""
    made = tempfile.TemporaryDirectory(prefix="posttrain-bench-")
    folder = Path(made.name)
    workspace = init_workspace(folder)
    config = InitModelConfig(hidden_size=16, intermediate_size=16, layers=1, context_length=CONTEXT)
    tokenizer = character_tokenizer(config.characters)
    initial_model(config, tokenizer, seed=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    workspace.catalog.add_model(folder / "model", "tiny")
    (folder / "reward.py").write_text("def score(completion, answer):\n    return float(completion == answer)\n")
    (folder / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "heldout.jsonl").write_text(3 * (json.dumps(ROW) + "\n"))
    workspace.catalog.add_dataset(folder / "heldout.jsonl", "heldout")
    workspace.close()
    return made


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    believe_rewards(monkeypatch)
    made = Bench(tmp_path)
    yield made
    made.workspace.close()


def change(stage: str, **values: Any) -> Change:
    return lambda raw: raw["stages"][stage].update(values)


def test_rows_that_fit_to_the_token(bench: Bench) -> None:
    planned = plan(bench.file(change("sft", max_length=21)), bench.workspace)
    assert planned.warnings == ()


def test_demonstrations(bench: Bench) -> None:
    assert bench.refused(change("sft", max_length=20)) == (
        "stages.sft.data: path:train.jsonl row 1: prompt and completion of 21 tokens exceed max_length of 20; "
        "shorten or drop the row, or raise max_length"
    )
    bench.rows("train", ROW, {**ROW, "completion": "A: " + "1" * 20})
    assert "row 2: prompt and completion of 39 tokens exceed the context of 32" in bench.refused()
    bench.rows("train", ROW, {**ROW, "prompt": ""})
    assert (
        "train.jsonl row 2: a prompt must have at least one token, got an empty prompt; write a prompt"
        in bench.refused()
    )
    bench.rows("train", {"prompt": "Q: sort 31", "answer": "13"})
    assert "train.jsonl row 1: a demonstration needs completion" in bench.refused()


def test_a_data_set_of_several_files(bench: Bench) -> None:
    folder = bench.folder / "shards"
    folder.mkdir()
    for name in ("a", "b"):
        bench.rows(name, {**ROW, "prompt": [{"role": "user", "content": f"Q: {name}"}]}).rename(
            folder / f"{name}.jsonl"
        )
    bench.workspace.catalog.add_dataset(folder, "shards")
    for word in ("./shards", "./shards/*.jsonl", "dataset:shards"):
        path = bench.file(lambda raw, word=word: raw["data"].update(train=word))  # type: ignore[misc]
        data = plan(path, bench.workspace).manifest.stage("sft").inputs["data"]
        assert (data.form, data.digest) == ("tree", bench.workspace.catalog.find("dataset:shards").digest)
        assert view_plan(bench.workspace, path).stages
    submit(path, workspace=bench.workspace)
    bench.rows("b", {**ROW, "completion": "A: " + "1" * 20}).rename(folder / "b.jsonl")
    with pytest.raises(InputError, match=r"path:shards/b\.jsonl row 1: prompt and completion of .* exceed the context"):
        plan(bench.file(lambda raw: raw["data"].update(train="./shards")), bench.workspace)


def test_prompts_with_their_responses(bench: Bench) -> None:
    assert bench.refused(change("grpo", max_new_tokens=18)) == (
        "stages.grpo.data: path:train.jsonl row 1: prompt of 15 tokens + a response of up to 18 exceeds the context of "
        "32; shorten or drop the row, or lower max_new_tokens"
    )
    bench.heldout(ROW, ROW, LONG)  # the probe takes the first two
    assert bench.refused().startswith("stages.evaluate.suites.heldout: dataset:heldout@2 row 3: prompt of 16 tokens")
    bench.heldout(ROW, LONG)
    assert bench.refused().startswith("stages.grpo.probe: dataset:heldout@3 row 2: prompt of 16 tokens")


def test_answers(bench: Bench) -> None:
    bench.heldout(ROW, ROW, {**ROW, "answer": None})
    assert "stages.evaluate.suites.heldout: dataset:heldout@" in (said := bench.refused())
    assert "row 3 must have an answer as text, got no answer in the columns" in said


def test_a_pair_of_equal_responses(bench: Bench) -> None:
    pair = {"prompt": ROW["prompt"], "chosen": "A: 13", "rejected": "A: 31"}
    chats = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]

    def judged(raw: dict[str, Any]) -> None:
        raw["stages"]["judge"] = {"kind": "reward_model", "data": "pairs", "steps": 1}
        raw["data"]["pairs"] = "pairs.jsonl"

    bench.rows("pairs", pair, {**pair, "rejected": pair["chosen"]})
    assert "path:pairs.jsonl row 2: chosen and rejected must differ, got the same response" in bench.refused(judged)
    bench.rows("pairs", pair, {"chosen": chats, "rejected": chats})
    assert "pairs.jsonl row 2: chosen and rejected must begin with the same prompt" in bench.refused(judged)
    (bench.folder / "model" / "tokenizer.json").rename(bench.folder / "tokenizer.json")
    bench.workspace.catalog.add_model(bench.folder / "model", "tiny")  # one whose tokens only the job can count
    bench.rows("pairs", pair, {**pair, "rejected": pair["chosen"]})
    assert "pairs.jsonl row 2: chosen and rejected must differ" in bench.refused(judged)


def test_labelled_completions(bench: Bench) -> None:
    row = {"prompt": ROW["prompt"], "completion": "A: 13", "label": True}
    bad, pair = {**row, "label": False}, {"prompt": ROW["prompt"], "chosen": "A: 13", "rejected": "A: 31"}

    def judged(raw: dict[str, Any], **params: Any) -> None:
        raw["stages"]["kto"] = {"kind": "kto", "model": "sft", "data": "labels", "steps": 1, **params}
        raw["data"]["labels"] = "labels.jsonl"

    def probed(raw: dict[str, Any]) -> None:
        judged(raw, probe={"data": "held", "items": 1})
        raw["data"]["held"] = "held.jsonl"

    def refused(*rows: dict[str, Any]) -> str:
        bench.rows("labels", *rows)
        return bench.refused(judged)

    told = "stages.kto.data: path:labels.jsonl row 2: "
    needed = f"{told}a labelled row needs prompt, completion and label, or prompt, chosen and rejected, got no"
    assert refused(row, {**row, "label": None}).startswith(f"{needed} label; add it, or drop the row")
    assert refused(row, {"messages": row["prompt"], "label": True}).startswith(f"{needed} prompt and no completion;")
    for label in (1, "true", 0.0, [True]):
        wrong = f"{told}label must be true or false, got {label!r}; write a boolean, in JSON or Parquet"
        assert refused(row, {**row, "label": label}) == wrong
    assert refused(row, {**pair, "rejected": pair["chosen"]}).startswith(f"{told}chosen and rejected must differ")
    assert refused(row, {**pair, "rejected": None}).startswith(f"{told}a preference needs prompt, chosen and rejected")
    long = {**pair, "rejected": "A: " + 30 * "1"}
    assert refused(row, bad, long).startswith("stages.kto.data: path:labels.jsonl row 3: prompt and completion of 49")
    assert refused(row, row).startswith(
        "stages.kto.data: path:labels.jsonl must have labels true and false, got only true in 2 rows; add rows with "
        "label false"
    )
    assert refused(bad).startswith("stages.kto.data: path:labels.jsonl must have at least 2 labelled completions")
    bench.rows("labels", row, bad)
    bench.rows("held", row, bad)
    assert bench.refused(probed).startswith("stages.kto.probe: path:held.jsonl must have at least 2 labelled")
    for good in ((row, bad), (pair,), (row, pair)):
        bench.rows("labels", *good)
        assert plan(bench.file(judged), workspace=bench.workspace).manifest.stage("kto").kind == "kto"


def test_passes_over_labelled_completions_count_a_pair_twice(bench: Bench) -> None:
    row = {"prompt": ROW["prompt"], "completion": "A: 13", "label": True}
    pair = {"prompt": ROW["prompt"], "chosen": "A: 13", "rejected": "A: 31"}
    bench.rows("labels", row, pair, pair, row)

    def change(raw: dict[str, Any]) -> None:
        stage = {"kind": "kto", "model": "sft", "data": "labels", "epochs": 2, "batch_size": 4}
        raw["stages"]["kto"], raw["data"]["labels"] = stage, "labels.jsonl"

    assert plan(bench.file(change), workspace=bench.workspace).manifest.stage("kto").params["steps"] == 3


def test_chat_rows_without_a_template(bench: Bench) -> None:
    folder = bench.folder / "untemplated"
    (bench.folder / "model").rename(folder)
    (folder / "chat_template.jinja").rename(bench.folder / "kept")
    try:
        said = bench.refused(lambda raw: raw.update(model="./untemplated"))
    finally:
        (bench.folder / "kept").rename(folder / "chat_template.jinja")
        folder.rename(bench.folder / "model")
    assert said.startswith("stages.sft.data: path:train.jsonl row 1: a chat row needs a tokenizer with a chat template")


def test_what_the_engine_will_not_do_fast_is_a_warning(bench: Bench) -> None:
    file = bench.folder / "model" / "config.json"
    kept = file.read_bytes()
    path = bench.file(lambda raw: raw.update(model="./model"))
    assert not [w for w in view_plan(bench.workspace, path).warnings if "falls back" in w]
    try:
        file.write_text(json.dumps({**json.loads(kept), "model_type": "bloom", "logits_scaling": 2.0}))
        found = view_plan(bench.workspace, bench.file(lambda raw: raw.update(model="./model"))).warnings
    finally:
        file.write_bytes(kept)
    told = {tuple(w.split(": ")[:2]) for w in found if "falls back" in w}
    assert ("sft", "falls back to padding") in told
    assert ("sft", "falls back to whole_logits") in told
    assert ("evaluate", "falls back to module_decoder") in told
    assert ("evaluate", "falls back to padding") not in told
    assert ("sft", "falls back to module_decoder") not in told


def test_a_tokenizer_that_needs_transformers_is_a_warning(bench: Bench) -> None:
    file = bench.folder / "model" / "tokenizer.json"
    file.rename(bench.folder / "kept")
    try:
        path = bench.file(lambda raw: raw.update(model="./model"))
        warnings = view_plan(bench.workspace, path).warnings
        bench.heldout({**ROW, "answer": None})
        assert "must have an answer" in bench.refused(lambda raw: raw.update(model="./model"))
    finally:
        (bench.folder / "kept").rename(file)
    assert [w for w in warnings if "tokenizer.json" in w] == [
        f"path:model has no tokenizer.json, so the lengths of {name} are checked when the job starts"
        for name in ("path:train.jsonl", "dataset:heldout@1")
    ]


def test_what_fits_is_remembered_and_what_does_not_is_not(bench: Bench) -> None:
    fits = bench.workspace.root / "cache" / "fits"
    plan(bench.file(), bench.workspace)
    before = set(fits.glob("*"))
    bench.rows("train", {**ROW, "answer": "fresh"})
    plan(bench.file(), bench.workspace)
    assert len(set(fits.glob("*")) - before) == 2, "for sft and for grpo; the suites have been seen"
    known = set(fits.glob("*"))
    plan(bench.file(), bench.workspace)
    assert set(fits.glob("*")) == known
    for _ in range(2):
        assert "exceeds the context" in bench.refused(change("grpo", max_new_tokens=30))


def test_corrupt_rows_are_found_before_anything_runs(bench: Bench) -> None:
    bench.heldout(ROW, {**ROW, "prompt": [{"role": "user", "content": "Q: sort 21"}]})
    digest = bench.workspace.catalog.find("dataset:heldout").digest
    place = f"{bench.file()}: stages.grpo.probe: dataset:heldout@2: blob {digest} "
    blob = blob_path(bench, digest)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-3] + b"!}\n")
    with pytest.raises(IntegrityError) as caught:
        plan(bench.file(), bench.workspace)
    assert str(caught.value).startswith(f"{place}is corrupt")
    assert str(caught.value).endswith("; register it again with posttrain asset add")
    bench.workspace.catalog.add_dataset(bench.folder / "heldout.jsonl", "heldout")
    plan(bench.file(), bench.workspace)


def test_rows_that_rot_after_they_fitted_are_named_too(bench: Bench) -> None:
    plan(bench.file(), bench.workspace)
    blob = blob_path(bench, bench.workspace.catalog.find("dataset:heldout").digest)
    blob.chmod(0o644)
    blob.write_bytes(b"{}")
    with pytest.raises(IntegrityError, match=r"run.yaml: stages.evaluate.suites.heldout: dataset:heldout@1: blob"):
        view_plan(bench.workspace, bench.file())


def test_a_model_whose_files_are_missing_is_named(bench: Bench) -> None:
    listing = tree_listing(bench.workspace.blobs, bench.workspace.catalog.find("model:tiny").digest)
    blob_path(bench, listing["tokenizer.json"].digest).unlink()
    with pytest.raises(NotFoundError, match=r"run.yaml: model: model:tiny@1: blob .* register it again"):
        plan(bench.file(), bench.workspace)


def blob_path(bench: Bench, digest: str) -> Path:
    body = digest.removeprefix("sha256:")
    return bench.workspace.root / "blobs" / "sha256" / body[:2] / body[2:]


def test_a_cache_that_cannot_be_written_does_not_matter(bench: Bench) -> None:
    (bench.workspace.root / "cache" / "fits").write_text("a file where the folder should be")
    assert plan(bench.file(), bench.workspace).manifest.name == "sort"


def test_rows_that_repeat_an_item_are_told_and_counted_once(bench: Bench) -> None:
    def gated(raw: dict[str, Any], at_least: float = 0.8) -> None:
        raw["gates"] = [{"name": "accuracy", "metric": "heldout/accuracy", "at_least": at_least}]
        raw["release"] = {"channel": "prod", "model": "grpo"}

    rows = [{**ROW, "prompt": [{"role": "user", "content": f"Q: {number}"}]} for number in range(20)]
    bench.heldout(*rows * 10)
    view = view_plan(bench.workspace, bench.file(gated))
    assert [note.items for note in view.power] == [20]
    told = "dataset:heldout@2: 180 of 200 rows repeat another row; repeats count once, so the suite has 20 items"
    assert told in view.warnings
    assert told in view_plan(bench.workspace, bench.file(gated)).warnings, "also when the fit is remembered"
    with pytest.raises(InputError, match=r"proven by 20 items at .* \(180 of 200 rows repeat another\)"):
        view_plan(bench.workspace, bench.file(lambda raw: gated(raw, 0.9)))


def test_a_prompt_with_two_answers_is_no_item_but_may_be_a_probe(bench: Bench) -> None:
    bench.heldout(ROW, LONG, {**ROW, "answer": "other"})

    def roomy(raw: dict[str, Any]) -> None:
        raw["stages"]["evaluate"]["suites"]["heldout"]["max_new_tokens"] = 8
        raw["stages"]["grpo"]["max_new_tokens"] = 8

    with pytest.raises(InputError) as caught:
        plan(bench.file(roomy), bench.workspace)
    assert str(caught.value) == (
        f"{bench.file(roomy)}: stages.evaluate.suites.heldout: dataset:heldout@2 row 3 repeats the prompt of row 1"
        " but has a different answer; no response can be correct for both; drop one row"
    )

    def probed(raw: dict[str, Any]) -> None:
        roomy(raw)
        del raw["stages"]["evaluate"]

    plan(bench.file(probed), bench.workspace)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("def score(x, y):\n    return 1.0\n", r"reward.py:1 (score): parameters (x, y) match no known dialect"),
        (
            "def score(completion, /):\n    return 1.0\n",
            "reward.py:1 (score): parameter 'completion' is positional-only",
        ),
        (
            "def score(completions, solution, **kwargs):\n    return [1.0]\n",
            "reward.py (score): parameter 'solution' is neither a column of path:train.jsonl nor part of the call",
        ),
        ("def score(solution_str, answer):\n    return 1.0\n", "parameter 'answer' is neither a column"),
    ],
)
def test_a_reward_that_no_call_fits_is_refused_without_being_run(bench: Bench, source: str, match: str) -> None:
    (bench.folder / "reward.py").write_text(f"{source}\nraise SystemExit('a plan must not execute')\n")
    assert match in bench.refused()


def test_what_a_plan_cannot_know_of_a_reward_is_a_warning(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.preflight.confinement.check_imports", lambda *given: None)
    (bench.folder / "reward.py").write_text("from trl.rewards import accuracy_reward as score\n")
    assert plan(bench.file(), bench.workspace).warnings == (
        "rewards.exact: reward.py (score): score is imported, so its dialect is unknown until the stage starts",
    )
    (bench.folder / "reward.py").write_text("def score(completion, level):\n    return 1.0\n")
    bench.rows("train", {**ROW, "level": 3}, ROW)  # one row has the column, the others are given None
    assert plan(bench.file(), bench.workspace).warnings == ()
    bench.workspace.catalog.add_reward(bench.folder / "reward.py", "leveled")
    bench.rows("train", ROW)
    refused = bench.refused(lambda raw: raw["rewards"].update(exact="reward:leveled"))
    assert "rewards.exact: reward.py (score): parameter 'level' is neither a column of path:train.jsonl" in refused


def test_a_column_that_takes_the_place_of_the_turns_is_told(bench: Bench) -> None:
    (bench.folder / "reward.py").write_text("def score(turns):\n    return float(len(turns))\n")
    assert plan(bench.file(), bench.workspace).warnings == ()
    bench.rows("train", {**ROW, "turns": ["a", "b"]})
    (told,) = plan(bench.file(), bench.workspace).warnings
    assert "reward.py (score) receives the column turns of " in told
    assert told.endswith("not the turns of the policy; rename the column to receive the policy's turns")


def test_a_reward_of_an_installed_package(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bench.folder / "site"
    (site / "rated_rows-0.3.dist-info").mkdir(parents=True)
    (site / "rated_rows-0.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rated-rows\nVersion: 0.3\n"
    )
    (site / "rated_rows-0.3.dist-info" / "top_level.txt").write_text("rated_rows\n")
    (site / "rated_rows.py").write_text("def exact(completion, answer): ...\ndef solved(completion, solution): ...\n")
    monkeypatch.syspath_prepend(str(site))  # of this process alone: the cell has another path
    monkeypatch.setattr("posttrain.preflight.confinement.check_imports", lambda *given: None)
    planned = plan(bench.file(lambda raw: raw["rewards"].update(exact="rated_rows:exact")), bench.workspace)
    reward = planned.manifest.stage("grpo").inputs["reward"]
    assert (reward.name, planned.warnings) == ("rated_rows:exact", ())
    refused = bench.refused(lambda raw: raw["rewards"].update(exact="rated_rows:solved"))
    assert refused.startswith(
        "rewards.exact: rated_rows:solved: parameter 'solution' is neither a column of path:train"
    )
    submit(bench.file(lambda raw: raw["rewards"].update(exact="rated_rows:exact")), workspace=bench.workspace)
    assert b"rated-rows 0.3" in bench.workspace.blobs.get(str(reward.digest))
