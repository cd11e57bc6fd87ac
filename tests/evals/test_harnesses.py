"""The clients of lm-eval, Inspect and OpenAI, and curl, over a served model; lm-eval's scores are those of its `hf`."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pyarrow.parquet
import pytest
import yaml
from served_model import ServedModel, serving
from tiny_run import MODEL
from workbench import Workbench

pytestmark = pytest.mark.evals
TESTS = Path(__file__).resolve().parents[1]
PYTHON = TESTS.parent / ".venv" / "evals" / "bin" / "python"
ITEMS = 60


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A workspace with a model of characters, which has a chat template, and one of byte pairs."""
    made = Workbench(tmp_path_factory.mktemp("evals") / "bench")
    made.folder.mkdir()
    made.write("model.yaml", {**MODEL, "context_length": 512, "hidden_size": 64, "intermediate_size": 128})
    made.run("init")
    made.run("asset", "create", "model:tiny", "model.yaml", "--seed", "3")
    families.build("qwen3").save_pretrained(made.folder / "pairs")
    families.tokenizer().save_pretrained(made.folder / "pairs")
    made.run("asset", "add", "model:pairs", "pairs")
    yield made
    made.clean()


@pytest.fixture(scope="module")
def served(bench: Workbench) -> Iterator[ServedModel]:
    with serving(bench, "model:tiny", "--name", "served") as made:
        yield made


def client(tmp_path: Path, what: str, *words: str) -> dict[str, Any]:
    """What `harness_clients` found in the environment of the harnesses."""
    out = tmp_path / "out.json"
    command = [PYTHON, TESTS / "evals" / "harness_clients.py", what, *words, out]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(out.read_text()))


def tasks(folder: Path, rows_file: str = "") -> Path:
    """Multiple choice, generation and perplexity on local data; `rows_file` is how the tasks name it."""
    dice, made = random.Random(5), folder / "tasks"
    made.mkdir()
    rows = []
    for _ in range(ITEMS):
        first, second = dice.randrange(10, 99), dice.randrange(10, 99)
        choices = [str(first + second), str(first - second), f"{first} and {second}"]
        rows.append({"q": f"Q: {first} plus {second}\nA:", "ch": choices, "a": 0, "t": choices[0]})
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": rows_file or str(made / "rows.jsonl")}}
    base = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "doc_to_text": "{{q}}"}
    mean = {"aggregation": "mean", "higher_is_better": True}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "ch", "doc_to_target": "a",
              "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}]}  # fmt: skip
    until = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    drawn = {"output_type": "generate_until", "doc_to_target": "t", "generation_kwargs": until,
             "metric_list": [{"metric": "exact_match", **mean}]}  # fmt: skip
    perplexity = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}} {{t}}",
                  "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]}  # fmt: skip
    for name, more in (("choice", choice), ("drawn", drawn), ("perplexity", perplexity)):
        (made / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **base, **more}))
    return made


def test_scores_of_lm_eval_are_those_of_the_weights(bench: Workbench, served: ServedModel, tmp_path: Path) -> None:
    bench.run("export", "model:tiny", str(tmp_path / "model"))
    found = client(tmp_path, "lm-eval", served.url, str(tmp_path / "model"), str(tasks(tmp_path)))
    own = found["served"]
    print(
        f"lm-eval, {3 * ITEMS} documents, seconds: { {name: round(one['seconds'], 2) for name, one in found.items()} }"
    )
    for name in ("hf-1", "hf-16", "hf-64"):
        for task, rows in found[name]["items"].items():
            assert len(rows) == len(own["items"][task]) == ITEMS
            for row, mine in zip(sorted(rows), sorted(own["items"][task]), strict=True):
                assert flat(mine) == pytest.approx(flat(row), abs=2e-4) if task != "drawn" else mine == row
        for task, results in found[name]["results"].items():
            numbers = {metric: value for metric, value in results.items() if isinstance(value, float)}
            assert numbers
            for metric, value in numbers.items():
                assert own["results"][task][metric] == pytest.approx(value, rel=1e-5), (task, metric)


def flat(value: Any) -> list[float]:
    """All numbers in it."""
    if isinstance(value, list):
        return [number for one in value for number in flat(one)]
    return [float(value)] if isinstance(value, int | float) or str(value).lstrip("-").replace(".", "").isdigit() else []


def test_the_provider_of_inspect(bench: Workbench, served: ServedModel, tmp_path: Path) -> None:
    rows = [{"input": f"{n}", "target": "x", "id": n} for n in range(31, 37)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = client(tmp_path, "inspect", served.url, str(tmp_path / "rows.jsonl"))
    assert found["status"] == "success"
    for name, answer in found["answers"].items():
        asked = {"messages": [{"role": "user", "content": name}], "temperature": 0, "max_tokens": 16}
        assert served.ask("/v1/chat/completions", asked)[2]["choices"][0]["message"]["content"] == answer


def test_the_official_client(served: ServedModel, tmp_path: Path) -> None:
    found = client(tmp_path, "openai", served.url)
    digest = served.ask("/health")[2]["digest"]
    assert found["chat"] == [found["stream"]] * 2
    assert (found["tops"], found["fingerprint"]) == (2, digest)
    assert [
        text.startswith(prompt) for text, prompt in zip(found["completions"], ("Q: 31\nA:", "Q: 7\nA:"), strict=True)
    ]
    assert "frequency_penalty" in found["refused"]
    assert found["many"] == [served.texts("Q: 31\nA:", temperature=1, seed=n, max_tokens=8)[0] for n in range(16)]
    assert found["models"] == ["served"]


def test_curl(served: ServedModel) -> None:
    tool = shutil.which("curl")
    assert tool is not None
    asked = json.dumps({"prompt": "Q: 31\nA:", "max_tokens": 8, "temperature": 0, "stream": True})
    words = [tool, "-sN", "--fail", f"{served.url}/v1/completions", "-d", asked]
    said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    events = [json.loads(line.removeprefix("data: ")) for line in said.splitlines() if line and "[DONE]" not in line]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert [text] == served.texts("Q: 31\nA:", max_tokens=8)


def test_a_stage_measures_with_lm_eval(bench: Workbench, tmp_path: Path) -> None:
    """`harness fetch`, and a stage whose scores are those of lm-eval's own `hf` model, item by item."""
    tasks(bench.folder, "rows.jsonl")
    names = ("choice", "drawn", "perplexity")
    fetched = bench.run("harness", "fetch", "lm-eval", *names, "--include", "tasks", "-o", "json").json
    packages = fetched["meta"]["packages"]
    assert packages["lm_eval"][0] == "0.4.13"
    assert all(digest.startswith("sha256:") for _, digest in packages.values())
    assert {name: task["documents"] for name, task in fetched["meta"]["tasks"].items()} == dict.fromkeys(names, ITEMS)
    stage = {"kind": "evaluate", "model": "base", "harness": "lm-eval", "max_length": 512}
    spec = {"name": "bench", "owner": "e2e", "seed": 5, "model": "model:tiny", "stages": {"bench": stage}}
    bench.write("bench.yaml", spec)
    begun = time.perf_counter()
    bench.run("run", "bench.yaml")
    print(f"a run with one harness stage: {time.perf_counter() - begun:.1f} s")
    run = bench.run_id()
    bench.run("export", "model:tiny", str(tmp_path / "model"))
    found = client(tmp_path, "lm-eval", "http://127.0.0.1:9", str(tmp_path / "model"), str(tasks(tmp_path)))
    outputs = bench.root / "runs" / run / "bench" / "001" / "outputs"
    items = pyarrow.parquet.read_table(outputs / "metrics.parquet").to_pylist()
    for name in ("choice", "drawn"):
        for row in found["hf-16"]["items"][name]:
            mine = {one["metric"]: one["value"] for one in items if one["item_id"].startswith(f"doc {row[0]} (")}
            values = dict(zip(METRICS[name], row[2:], strict=True))
            assert {metric: mine[metric] for metric in values} == values
    results = found["hf-16"]["results"]
    metrics = bench.run("get", run, "-o", "json").json["stages"][0]["metrics"]
    assert metrics["choice/acc"] == pytest.approx(results["choice"]["acc,none"])
    for metric in ("word_perplexity", "bits_per_byte"):
        assert metrics[f"perplexity/{metric}"] == pytest.approx(results["perplexity"][f"{metric},none"], rel=1e-5)
    texts = pyarrow.parquet.read_table(outputs / "items.parquet").to_pylist()
    drawn = {one["item_id"].split()[1]: one["response"] for one in texts if one["suite"] == "drawn"}
    assert {str(row[0]): row[1][0] for row in found["hf-16"]["items"]["drawn"]} == drawn


METRICS = {"choice": ("choice/acc", "choice/acc_norm"), "drawn": ("drawn/exact_match",)}
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def arith():
    return Task(dataset=json_dataset("rows.jsonl"), solver=generate(), scorer=includes())
"""


def test_a_stage_measures_with_inspect(bench: Workbench) -> None:
    folder = bench.folder / "arithmetic"
    folder.mkdir()
    (folder / "arith.py").write_text(INSPECT_TASK)
    rows = [{"input": f"{n}", "target": ":", "id": n} for n in range(31, 37)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench.run("harness", "fetch", "inspect", "arith.py", "--include", "arithmetic")
    stages = {"bench": {"kind": "evaluate", "model": "base", "harness": "inspect", "max_new_tokens": 16}}
    spec = {"name": "arith", "owner": "e2e", "seed": 5, "model": "model:tiny", "stages": stages}
    bench.write("arith.yaml", spec)
    bench.run("run", "arith.yaml")
    run = bench.run_id()
    outputs = bench.root / "runs" / run / "bench" / "001" / "outputs"
    texts = pyarrow.parquet.read_table(outputs / "items.parquet").to_pylist()
    greedy = ("--chat", "--max-new-tokens", "16", "--temperature", "0", "-o", "json")
    own = bench.run("sample", "model:tiny", *(row["input"] for row in rows), *greedy).json["answers"]
    said = [re.sub(r"<\|\w+\|>", "", one["text"]) for one in own]  # a chat's answer has no special tokens
    assert sorted(row["response"] for row in texts) == sorted(said)
    right = {
        one["item_id"]: one["value"] for one in pyarrow.parquet.read_table(outputs / "metrics.parquet").to_pylist()
    }
    assert right == {row["item_id"]: float(":" in row["response"]) for row in texts}
