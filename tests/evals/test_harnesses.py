"""The clients of lm-eval, Inspect and OpenAI, and curl, over a served model; lm-eval's scores are those of its `hf`."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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


@pytest.mark.parametrize("name", ["tiny", "pairs"])
def test_scores_of_lm_eval_are_those_of_the_weights(bench: Workbench, name: str, tmp_path: Path) -> None:
    bench.run("export", f"model:{name}", str(tmp_path / "model"))
    with serving(bench, f"model:{name}", "--name", "served") as door:
        found = client(tmp_path, "lm-eval", door.url, str(tmp_path / "model"), str(tasks(tmp_path)))
    own = found["served"]
    print(
        f"lm-eval, {3 * ITEMS} documents, seconds: { {name: round(one['seconds'], 2) for name, one in found.items()} }"
    )
    for size in ("hf-1", "hf-16", "hf-64"):
        for task, rows in found[size]["items"].items():
            assert len(rows) == len(own["items"][task]) == ITEMS
            for row, mine in zip(sorted(rows), sorted(own["items"][task]), strict=True):
                assert flat(mine) == pytest.approx(flat(row), abs=2e-4) if task != "drawn" else mine == row
        for task, results in found[size]["results"].items():
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


HUB_TASK = {
    "task": "sums", "dataset_path": "team/sums", "test_split": "test", "output_type": "generate_until",
    "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "metadata": {"version": 2.0},
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


@contextmanager
def hub() -> Iterator[str]:
    """A server with the parts of the hub's API that `datasets` asks for one data set."""
    rows = [{"question": f"Q: {n} plus {n + 1}\nA:", "answer": f"{2 * n + 1}"} for n in (1, 2)]
    files = {
        "test.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        "README.md": b"---\nlicense: mit\n---\n",
    }
    sha, api = "a" * 40, "/api/datasets/team/sums"
    listed = [{"type": "file", "path": name, "size": len(data), "oid": sha} for name, data in files.items()]
    about = {"_id": "1", "id": "team/sums", "sha": sha, "private": False, "gated": False, "disabled": False, "tags": [],
             "downloads": 0, "likes": 0, "siblings": [{"rfilename": name} for name in files]}  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            name = path.rpartition(f"/resolve/{sha}/")[2] if "/resolve/" in path else ""
            found = files.get(name) or json.dumps(listed if path.startswith(f"{api}/tree/") else about).encode()
            missing = (name and name not in files) or not path.startswith(
                ("/api/datasets/team/sums", "/datasets/team/sums")
            )
            self.send_response(404 if missing else 200)
            self.send_header("content-length", str(len(found)))
            self.send_header("x-repo-commit", sha)
            self.send_header("etag", f'"{hashlib.sha256(found).hexdigest()}"')
            if missing:
                self.send_header("x-error-code", "EntryNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(found)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_stage_measures_with_lm_eval(bench: Workbench, tmp_path: Path) -> None:
    """`harness fetch`, and a stage whose scores are those of lm-eval's own `hf` model, item by item."""
    folder = tasks(bench.folder, "rows.jsonl")
    (folder / "sums.yaml").write_text(yaml.safe_dump(HUB_TASK))
    inner = {"group": "inner", "task": ["choice", "drawn"], "aggregate_metric_list": [{"metric": "acc"}]}
    both = {"group": "both", "task": [inner, "perplexity"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "both.yaml").write_text(yaml.safe_dump(both))
    names = ("choice", "drawn", "perplexity")
    with hub() as url:
        asked = ("harness", "fetch", "lm-eval", "both", "sums", "--include", "tasks", "-o", "json")
        fetched = bench.run(*asked, env={"HF_ENDPOINT": url}).json
    assert fetched["meta"]["groups"] == {"both": [*names], "both::inner": [*names[:2]]}
    packages = fetched["meta"]["packages"]
    assert packages["lm_eval"][0] == "0.4.13"
    assert all(digest.startswith("sha256:") for _, digest in packages.values())
    documents = {name: task["documents"] for name, task in fetched["meta"]["tasks"].items()}
    assert documents == {**dict.fromkeys(names, ITEMS), "sums": 2}
    stage = {"kind": "evaluate", "model": "base", "harness": "lm-eval", "max_length": 512, "tasks": ["both", "sums"]}
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
        assert metrics[f"perplexity/{metric}/numerator"] < 0 < metrics[f"perplexity/{metric}/denominator"]
    assert "perplexity/word_perplexity" in bench.run("logs", run).out
    texts = pyarrow.parquet.read_table(outputs / "items.parquet").to_pylist()
    drawn = {one["item_id"].split()[1]: one["response"] for one in texts if one["suite"] == "drawn"}
    assert {str(row[0]): row[1][0] for row in found["hf-16"]["items"]["drawn"]} == drawn
    assert [one["prompt"] for one in texts if one["suite"] == "sums"] == ["Q: 1 plus 2\nA:", "Q: 2 plus 3\nA:"]


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


INSPECT_ROWS = '[__import__("inspect_ai").dataset.Sample(input="7", target=":", id=7)]'
INSPECT_PACKAGE = """
[project]
name = "sums"
version = "1.0"
[project.entry-points.inspect_ai]
sums = "sums.tasks"
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
"""


def test_a_stage_measures_with_inspect(bench: Workbench) -> None:
    folder = bench.folder / "arithmetic"
    folder.mkdir()
    (folder / "arith.py").write_text(INSPECT_TASK)
    rows = [{"input": f"{n}", "target": ":", "id": n} for n in range(31, 37)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    package = bench.folder / "package"
    (package / "sums").mkdir(parents=True)
    (package / "pyproject.toml").write_text(INSPECT_PACKAGE)
    (package / "sums" / "__init__.py").write_text("")
    (package / "sums" / "tasks.py").write_text(INSPECT_TASK.replace('json_dataset("rows.jsonl")', INSPECT_ROWS))
    more = ("sums/arith", "--with", str(package))
    bench.run("harness", "fetch", "inspect", "arith.py", *more, "--include", "arithmetic")
    stages = {"bench": {"kind": "evaluate", "model": "base", "harness": "inspect", "max_new_tokens": 16}}
    spec = {"name": "arith", "owner": "e2e", "seed": 5, "model": "model:tiny", "stages": stages}
    bench.write("arith.yaml", spec)
    bench.run("run", "arith.yaml")
    run = bench.run_id()
    outputs = bench.root / "runs" / run / "bench" / "001" / "outputs"
    texts = pyarrow.parquet.read_table(outputs / "items.parquet").to_pylist()
    assert [row["prompt"] for row in texts if row["suite"] == "sums/arith"] == ["7"]
    texts = [row for row in texts if row["suite"] == "arith"]
    greedy = ("--chat", "--max-new-tokens", "16", "--temperature", "0", "-o", "json")
    own = bench.run("sample", "model:tiny", *(row["input"] for row in rows), *greedy).json["answers"]
    said = [re.sub(r"<\|\w+\|>", "", one["text"]) for one in own]  # a chat's answer has no special tokens
    assert sorted(row["response"] for row in texts) == sorted(said)
    metrics = pyarrow.parquet.read_table(outputs / "metrics.parquet").to_pylist()
    right = {one["item_id"]: one["value"] for one in metrics if one["metric"] == "arith/includes"}
    assert right == {row["item_id"]: float(":" in row["response"]) for row in texts}
