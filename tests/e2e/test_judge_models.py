"""A stage serves a model to its rewards, or its rewards call another server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pyarrow.parquet
import pytest
from own_models import TINY, with_models
from served_model import serving
from workbench import Workbench

from posttrain.app.queries import manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
JUDGE = """
import json, os, urllib.request

URL = os.environ["POSTTRAIN_JUDGE_URL"]


def ask(text):
    body = {"prompt": text, "max_tokens": 6, "temperature": 0, "model": os.environ["POSTTRAIN_JUDGE_MODEL"]}
    headers = {"content-type": "application/json"}
    if "POSTTRAIN_JUDGE_KEY" in os.environ:
        headers["authorization"] = "Bearer " + os.environ["POSTTRAIN_JUDGE_KEY"]
    request = urllib.request.Request(URL + "/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def score(completion, prompt):
    said = ask("Q: " + completion[:8])
    print("KEY", os.environ.get("POSTTRAIN_JUDGE_KEY"))
    return sum(map(ord, said)) % 97 / 97
"""
RELEASE: dict[str, Any] = {
    "name": "released", "owner": "e2e", "seed": 2, "model": "model:tiny", "data": {"rows": "rows.jsonl"},
    "stages": {
        "made": {"kind": "init_model", **TINY.model_dump(exclude_unset=True)},
        "evaluate": {"kind": "evaluate", "model": "made", "suites": {"open": {"data": "rows", "max_new_tokens": 8}}},
    },
    "gates": [{"name": "ends", "metric": "open/response_tokens", "at_least": 2, "min_items": 8}],
    "release": {"channel": "judge", "model": "made"},
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A workspace with a model, another that judges and is live on a channel, and a reward that calls it."""
    folder = tmp_path_factory.mktemp("judged")
    rows = [{"prompt": f"Q: sort {i}", "answer": "1"} for i in range(8)]
    bench = with_models(folder, {"tiny": TINY}, rows)
    bench.write("release.yaml", RELEASE)
    for seed in ("1", "2"):
        bench.run("run", "release.yaml", "--seed", seed)
    bench.run("export", "channel:judge", "judge")
    bench.run("asset", "add", "model:judge", "judge")
    (folder / "judge.py").write_text(JUDGE)
    yield bench
    bench.clean()


def spec(models: dict[str, Any], stages: dict[str, Any] | None = None, **reward: Any) -> dict[str, Any]:
    evaluate = {
        "kind": "evaluate", "model": "base", "models": models,
        "suites": {"open": {"data": "rows", "reward": "judged", "max_new_tokens": 8}},
    }  # fmt: skip
    return {
        "name": "judged", "owner": "e2e", "seed": 5, "model": "model:tiny", "data": {"rows": "rows.jsonl"},
        "rewards": {"judged": {"ref": "judge.py", **reward}}, "stages": stages or {"evaluate": evaluate},
    }  # fmt: skip


def scores(home: Workbench, run: str) -> dict[str, float]:
    """Response → its score."""
    path = home.root / "runs" / run / "evaluate" / "001" / "outputs" / "items.parquet"
    return {row["response"]: row["reward"] for row in pyarrow.parquet.read_table(path).to_pylist()}


@pytest.fixture(scope="module")
def judged(home: Workbench) -> tuple[str, dict[str, float]]:
    """An evaluation whose reward calls the served judge."""
    home.write("run.yaml", spec({"judge": {"serve": "model:judge"}}))
    home.run("run", "run.yaml")
    return home.run_id(), scores(home, home.run_id())


def test_a_stage_serves_a_judge_to_its_reward(home: Workbench, judged: tuple[str, dict[str, float]]) -> None:
    run, found = judged
    greedy = ("--text", "--max-new-tokens", "6", "--temperature", "0", "-o", "json")
    for response, score in found.items():
        [own] = home.run("sample", "model:judge", f"Q: {response[:8]}", *greedy).json["answers"]
        assert score == pytest.approx(sum(map(ord, own["text"])) % 97 / 97)
    [stage] = home.run("get", run, "-o", "json").json["stages"]
    assert stage["state"] == "succeeded"
    said = (home.root / "runs" / run / "evaluate" / "001" / "log.txt").read_text()
    assert "KEY [POSTTRAIN_JUDGE_KEY]" in said
    planned = home.run("plan", "run.yaml", "-o", "json").json["manifest"]["stages"][0]["inputs"]
    assert planned["models.judge"]["name"] == "model:judge@1"


def test_a_judge_is_the_live_release_of_a_channel(home: Workbench, judged: tuple[str, dict[str, float]]) -> None:
    """The scores are those of the same model by its name, and the manifest pins the release."""
    live = home.run("get", "judge", "-o", "json").json["live"]
    home.write("channel.yaml", {**spec({"judge": {"serve": "channel:judge"}}), "name": "channel"})
    home.run("run", "channel.yaml")
    run = home.run_id()
    assert scores(home, run) == judged[1]
    assert len({*judged[1].values()}) > 1
    with home.open() as workspace:
        pinned = manifest(workspace, run).stages[0].inputs["models.judge"]
    assert (pinned.name, pinned.digest) == ("channel:judge@2", live)


def test_another_server_gives_the_same_scores(home: Workbench, judged: tuple[str, dict[str, float]]) -> None:
    with serving(home, "model:judge", "--name", "outside") as other:
        models = {"judge": {"url": f"{other.url}/v1", "model": "outside", "key": "OUTSIDE_PASS"}}
        home.write("url.yaml", spec(models))
        home.run("run", "url.yaml", env={"OUTSIDE_PASS": "not-for-logs"})
        assert scores(home, home.run_id()) == judged[1]
    said = _log(home)
    assert "KEY [" in said
    assert "not-for-logs" not in said


def test_a_wrong_judge_is_one_line_before_anything_is_sampled(home: Workbench) -> None:
    with serving(home, "model:judge", "--name", "outside") as other:
        url = f"{other.url}/v1"
        home.write("wrong.yaml", {**spec({"judge": {"url": url, "model": "inside"}}), "name": "wrong"})
        failed = home.run("run", "wrong.yaml", code=None)
    assert failed.code != 0
    assert f"models.judge at {url} must serve the model inside, got outside; correct `model`" in failed.out + failed.err


def test_a_stop_ends_the_wait_for_a_judge(home: Workbench) -> None:
    home.write("away.yaml", {**spec({"judge": {"url": "http://127.0.0.1:9/v1"}}), "name": "away"})
    started = home.run_ids()
    process = home.start("run", "away.yaml")
    run = home.wait_run(started)
    home.wait("a request in vain", lambda: "does not answer" in _log(home, "away-"))
    home.run("stop", run)
    home.finish(process)
    [stage] = home.run("get", run, "-o", "json").json["stages"]
    assert (stage["state"], stage["attempts"][-1]["state"]) == ("stopped", "stopped")


def test_training_with_a_judge_ends_its_server(home: Workbench) -> None:
    stage = {
        "kind": "grpo", "model": "base", "data": "rows", "reward": "judged", "steps": 2, "prompts_per_step": 2,
        "group_size": 2, "max_new_tokens": 8, "reward_timeout": 60.0, "models": {"judge": {"serve": "base"}},
    }  # fmt: skip
    home.write("train.yaml", spec({}, {"grpo": stage}))
    home.run("run", "train.yaml")
    assert not servers(home)
    slow = {**stage, "steps": 5000}
    home.write("slow.yaml", spec({}, {"grpo": slow}))
    process = home.start("run", "slow.yaml")
    live = home.wait("a server", lambda: servers(home))
    [job] = {one.ppid() for one in live}
    os.kill(job, signal.SIGKILL)
    home.wait("their end", lambda: not any(one.is_running() for one in live))
    home.run("stop", home.run_id())
    home.finish(process)
    home.wait("the end of all servers", lambda: not servers(home))


def servers(home: Workbench) -> list[psutil.Process]:
    """The servers of the workspace's jobs."""
    found = [one for one in psutil.process_iter(["cmdline"]) if "posttrain.serving" in (one.info["cmdline"] or ())]
    return [one for one in found if any(str(home.root) in " ".join(of.cmdline()) for of in one.parents())]


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ({"judge": {"serve": "model:none"}}, "models.judge: model:none: no model of that name is registered"),
        ({"judge": {"serve": "channel:none"}}, "channel:none"),
        ({"judge": {}}, "must have either serve or url"),
        ({"judge": {"serve": "base", "key": "JUDGE_TOKEN"}}, "key needs url"),
        ({"judge": {"url": "ftp://example.org"}}, "models.judge.url"),
        ({"judge": {"url": "http://example.org/v1", "context": 8}}, "context needs serve"),
    ],
)
def test_mistakes_in_models(home: Workbench, models: dict[str, Any], told: str) -> None:
    home.write("wrong.yaml", spec(models))
    assert told in home.run("plan", "wrong.yaml", code=None).error


def test_models_need_a_reward(home: Workbench) -> None:
    suites = {"open": {"data": "rows", "max_new_tokens": 8}}
    stage = {"kind": "evaluate", "model": "base", "models": {"judge": {"serve": "base"}}, "suites": suites}
    home.write("wrong.yaml", spec({}, {"evaluate": stage}))
    assert "needs a suite with a reward that calls it" in home.run("plan", "wrong.yaml", code=2).error


def test_a_key_of_the_drivers_environment_is_needed(home: Workbench) -> None:
    home.write("wrong.yaml", spec({"judge": {"url": "http://127.0.0.1:9/v1", "key": "OUTSIDE_PASS"}}))
    assert "OUTSIDE_PASS: the driver's environment must contain" in home.run("run", "wrong.yaml", code=2).error


def test_a_stage_whose_judge_died_is_measured_again(home: Workbench, judged: tuple[str, dict[str, float]]) -> None:
    """A reward that catches the error of its judge scores 0 for it: such scores do not count."""
    (home.folder / "patient.py").write_text(JUDGE.replace('    said = ask("Q: " + completion[:8])', PATIENT))
    made = spec({"judge": {"serve": "model:judge"}})
    made["rewards"]["judged"]["ref"] = "patient.py"
    made["stages"]["evaluate"]["suites"]["open"]["reward_timeout"] = 120.0
    home.write("patient.yaml", {**made, "name": "patient"})
    process = home.start("run", "patient.yaml")
    home.wait("a loaded model", lambda: process.poll() is not None or "start:" in _log(home, "patient-"))
    [live] = servers(home)
    live.kill()
    home.finish(process)
    [stage] = home.run("get", home.run_id(), "-o", "json").json["stages"]
    assert (stage["state"], len(stage["attempts"])) == ("succeeded", 2)
    path = home.root / "runs" / home.run_id() / "evaluate" / "002" / "outputs" / "items.parquet"
    assert {row["response"]: row["reward"] for row in pyarrow.parquet.read_table(path).to_pylist()} == judged[1]


PATIENT = """    import time
    time.sleep(2)
    try:
        said = ask("Q: " + completion[:8])
    except OSError:
        return 0.0"""


def _log(home: Workbench, name: str = "") -> str:
    """The log of the newest run's evaluation, if the run has this name."""
    path = home.root / "runs" / home.run_id() / "evaluate" / "001" / "log.txt"
    return path.read_text() if path.exists() and home.run_id().startswith(name) else ""
