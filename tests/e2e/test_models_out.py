"""A trained model asked, measured and taken out of its workspace, as a user does it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from workbench import Workbench

pytestmark = [pytest.mark.slow, pytest.mark.journey, pytest.mark.timeout(1500)]


def judged(bench: Workbench) -> list[dict[str, Any]]:
    """The greedy responses that the gates of the released model saw."""
    run = bench.run_id()
    with bench.open() as workspace:
        row = next(stage for stage in workspace.ledger.stages(run) if stage.name == "evaluate")
        table = bench.folder / "items.parquet"
        workspace.blobs.fetch(row.outputs["items"]["digest"], table)
    rows: list[dict[str, Any]] = pq.read_table(table).to_pylist()
    return [row for row in rows if row["kind"] == "greedy"]


def greedy(folder: Path, prompts: list[str], limit: int) -> list[str]:
    """What plain transformers says, one prompt at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    said = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        found = model.generate(**ids, max_new_tokens=limit, do_sample=False)[0, ids["input_ids"].shape[1] :]
        ended = found[-1] == tokenizer.eos_token_id
        said.append(tokenizer.decode(found[:-1] if ended else found))
    return said


def test_an_exported_model_says_in_plain_transformers_what_was_judged(bench: Workbench) -> None:
    bench.run("export", "prod", "out")
    rows = judged(bench)
    prompts = [json.loads(line)["prompt"][0]["content"] for line in (bench.folder / "heldout.jsonl").open()]
    assert greedy(bench.folder / "out", prompts, 24) == [row["response"] for row in rows]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_export_has_the_type_that_was_asked_for(bench: Workbench, dtype: str) -> None:
    done = bench.run("export", "prod", "out", "--dtype", dtype, "-o", "json").json
    assert done["cast"] == (dtype != "float32")
    wanted = getattr(torch, dtype)
    bench.run("export", "prod", "whole")
    cast, whole = (load_file(bench.folder / name / "model.safetensors") for name in ("out", "whole"))
    assert cast.keys() == whole.keys()
    for name, tensor in cast.items():
        assert torch.equal(tensor, whole[name].to(wanted))
    assert AutoModelForCausalLM.from_pretrained(bench.folder / "out", dtype="auto").dtype == wanted
    assert (bench.folder / "out" / "README.md").read_text().count(f"The weights are in {dtype}") == 1


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.deep), signal.SIGKILL])
def test_an_export_that_is_ended_leaves_a_whole_folder_or_none(bench: Workbench, number: int) -> None:
    process = bench.start("export", "prod", "out", "--dtype", "bfloat16")
    bench.wait("its beginning", lambda: process.poll() is not None or any(bench.folder.glob(".posttrain-export-*")))
    process.send_signal(number)
    bench.finish(process)
    left = list(bench.folder.glob(".posttrain-export-*"))
    if number == signal.SIGTERM:
        assert left == []
    for folder in left:  # what no process can take away, the next export in the same place does, a minute later
        os.utime(folder, (0, 0))
    if not (bench.folder / "out").exists():
        bench.run("export", "prod", "out", "--dtype", "bfloat16")
    assert {tensor.dtype for tensor in load_file(bench.folder / "out" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    bench.run("export", "prod", "more")
    assert list(bench.folder.glob(".posttrain-export-*")) == []


def test_sample_says_what_the_evaluation_said(bench: Workbench) -> None:
    rows = judged(bench)[:4]
    prompts = [json.loads(line)["prompt"][0]["content"] for line in (bench.folder / "heldout.jsonl").open()][:4]
    said = bench.run("sample", "prod", *prompts, "--max-new-tokens", "24", "-o", "json").json
    assert said["form"] == "chat"  # as its training data asks
    assert [answer["text"] for answer in said["answers"]] == [row["response"] for row in rows]
    assert [answer["tokens"] for answer in said["answers"]] == [row["tokens"] for row in rows]


def test_the_same_question_gets_the_same_samples_and_another_seed_others(bench: Workbench) -> None:
    ask = ("sample", "tiny/sft", "Q: sort 4213", "-n", "6", "-o", "json")
    first = bench.run(*ask).json
    assert bench.run(*ask).json == first
    assert len({answer["text"] for answer in first["answers"]}) > 1
    other = bench.run(*ask, "--seed", "1").json
    assert [answer["text"] for answer in other["answers"]] != [answer["text"] for answer in first["answers"]]
    likeliest = bench.run(*ask, "--top-k", "1").json["answers"]
    greedy = bench.run("sample", "tiny/sft", "Q: sort 4213", "-o", "json").json["answers"]
    assert {answer["text"] for answer in likeliest} == {greedy[0]["text"]}


def test_a_prompt_that_does_not_fit_is_one_line(bench: Workbench) -> None:
    finished = bench.run("sample", "prod", "Q: sort 1" * 100, code=2)
    assert "prompt row 1" in finished.err
    assert "Traceback" not in finished.err
    bench.wait_quiet()


def test_an_evaluation_without_a_run_file_measures_what_the_run_measured(bench: Workbench) -> None:
    run = bench.run_id()
    found = bench.run("eval", "prod", "heldout", "--max-new-tokens", "24", "-o", "json").json
    own = bench.run("get", run, "-o", "json").json
    stage = next(row for row in own["stages"] if row["name"] == "evaluate")
    assert found["scores"] == {f"evaluate/{name}": value for name, value in stage["metrics"].items()}


def test_a_run_goes_on_from_what_another_shipped(bench: Workbench) -> None:
    """SFT of no signal would change nothing: one step of it from prod's weights, then their lineage."""
    spec = {
        "name": "more",
        "owner": "e2e",
        "seed": 5,
        "model": "channel:prod",
        "data": {"train": "dataset:train"},
        "stages": {"sft": {"kind": "sft", "data": "train", "steps": 1, "batch_size": 8}},
    }
    bench.write("more.yaml", spec)
    bench.run("run", "more.yaml")
    tree = bench.run("lineage", "more").out
    assert "/grpo" in tree
    assert "model:tiny@1" in tree
    said = bench.run("sample", "run:more/sft", "Q: sort 42", "-o", "json").json
    assert said["model"].startswith("run:more-")
