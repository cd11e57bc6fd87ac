"""A stage asks vLLM's own server: a teacher of distillation, and a judge (make vllm)."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import with_models
from safetensors.torch import load_file
from torch import Tensor
from workbench import PATIENCE, Workbench

from posttrain.engine.config import InitModelConfig
from posttrain.store.trees import materialise

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
PYTHON = Path(__file__).resolve().parents[2] / ".venv" / "vllm" / "bin" / "python"
KEY = {"VLLM_PASS": "not-for-any-log"}
MOST = 16  # likeliest tokens that the server allows
JUDGE = """
import json, os, urllib.request


def score(completion, prompt):
    body = {"model": os.environ["POSTTRAIN_JUDGE_MODEL"], "prompt": prompt + completion[:8], "max_tokens": 4,
            "temperature": 0}
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["POSTTRAIN_JUDGE_KEY"]}
    url = os.environ["POSTTRAIN_JUDGE_URL"] + "/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return sum(map(ord, json.load(answer)["choices"][0]["text"])) % 97 / 97
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    folder = tmp_path_factory.mktemp("vllm")
    shape = {"kv_heads": 1, "intermediate_size": 64, "layers": 2, "context_length": 64}
    models = {
        name: InitModelConfig(hidden_size=32 * n, heads=n, **shape) for n, name in ((1, "student"), (2, "teacher"))
    }
    bench = with_models(folder, models, [{"prompt": f"Q: sort {i}", "answer": "1"} for i in range(12)])
    (folder / "judge.py").write_text(JUDGE)
    yield bench
    bench.clean()


@pytest.fixture(scope="module")
def url(home: Workbench) -> Iterator[str]:
    """The address of vLLM's server of the teacher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", "teacher", "--host", "127.0.0.1"),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--served-model-name", "big"),
        *("--enforce-eager", "--max-logprobs", str(MOST), "--api-key", KEY["VLLM_PASS"]),
    ]
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (home.folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(words, cwd=home.folder, env=environment, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 2 * PATIENCE
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).close()
                break
            assert process.poll() is None, (home.folder / "vllm.log").read_text()[-3000:]
            assert time.monotonic() < until
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def spec(**stage: Any) -> dict[str, Any]:
    return {
        "name": "outside", "owner": "e2e", "seed": 5, "model": "model:student", "data": {"rows": "rows.jsonl"},
        "rewards": {"judged": {"ref": "judge.py"}}, "stages": {"stage": {"model": "base", **stage}},
    }  # fmt: skip


def distil(teacher: Any, **changes: Any) -> dict[str, Any]:
    return spec(**{
        "kind": "distill", "teacher": teacher, "data": "rows", "steps": 4, "prompts_per_step": 6, "group_size": 2,
        "max_new_tokens": 12, "top_k": 8, "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0}, **changes,
    })  # fmt: skip


def weights(home: Workbench) -> dict[str, Tensor]:
    run = home.run_id()
    with home.open() as workspace:
        folder = materialise(workspace.blobs, home.outputs(run)["stage"], home.folder / "looked-at")
    return load_file(folder / "model.safetensors")


def test_a_student_learns_the_same_as_from_a_teacher_in_the_job(home: Workbench, url: str) -> None:
    home.write("run.yaml", distil("model:teacher"))
    home.run("run", "run.yaml")
    wanted = weights(home)
    home.write("run.yaml", distil({"url": url, "model": "big", "key": "VLLM_PASS"}))
    home.run("run", "run.yaml", env=KEY)
    for name, value in weights(home).items():
        torch.testing.assert_close(value, wanted[name], atol=1e-4, rtol=0)


def test_more_tokens_than_the_server_allows_are_refused_in_its_words(home: Workbench, url: str) -> None:
    home.write("run.yaml", distil({"url": url, "model": "big", "key": "VLLM_PASS"}, top_k=MOST + 1))
    failed = home.run("run", "run.yaml", env=KEY, code=None)
    assert failed.code != 0
    assert f"teacher at {url} refused /v1/completions with status 400: " in failed.out + failed.err
    assert str(MOST) in failed.out + failed.err
    home.write("run.yaml", distil({"url": url, "model": "big"}))
    assert "with status 401: " in (done := home.run("run", "run.yaml", code=None)).out + done.err


def test_a_reward_calls_it(home: Workbench, url: str) -> None:
    models = {"judge": {"url": url, "model": "big", "key": "VLLM_PASS"}}
    suites = {"open": {"data": "rows", "reward": "judged", "max_new_tokens": 8}}
    home.write("run.yaml", spec(kind="evaluate", models=models, suites=suites))
    home.run("run", "run.yaml", env=KEY)
    rows = {row["metric"]: row for row in home.run("get", home.run_id(), "-o", "json").json["scores"]["rows"]}
    assert 0 < rows["open/reward"]["value"] < 1
