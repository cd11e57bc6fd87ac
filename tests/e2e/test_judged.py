"""`posttrain eval MODEL SUITE --reward …` as a user does it: rows without answers, scores, comparison, errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from own_models import TINY, with_models
from workbench import Workbench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
RULES = (
    "def digits(completion):\n    return sum(map(str.isdigit, completion)) / max(1, len(completion))\n\n\n"
    "def brief(solution_str, ground_truth):\n    return 1 / (1 + len(solution_str))\n\n\n"
    "def much(completion):\n    return 3.0\n"
)


@pytest.fixture
def home(tmp_path: Path) -> Workbench:
    bench = with_models(tmp_path, {"tiny": TINY}, [{"prompt": f"Q: sort {i}"} for i in range(40)])
    (tmp_path / "rules.py").write_text(RULES)
    return bench


@pytest.mark.journey
def test_a_model_is_measured_by_a_reward(home: Workbench) -> None:
    asked = ("eval", "model:tiny", "./rows.jsonl", "--max-new-tokens", "8", "-o", "json")
    first = home.run(*asked, "--reward", "rules.py", "--entry", "digits", "--samples", "2")
    assert set(first.json["scores"]) == {
        f"evaluate/rows/{name}" for name in ("reward", "sampled_reward", "response_tokens", "truncated")
    }
    assert "40 of 40 items of path:rows.jsonl have no answer to compare with" in first.err
    rows = home.run("get", first.json["run"], "-o", "json").json["scores"]["rows"]
    score = next(row for row in rows if row["metric"] == "rows/reward")
    assert score["value"] == pytest.approx(first.json["scores"]["evaluate/rows/reward"])
    assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1
    other = home.run(*asked, "--reward", "rules.py", "--entry", "brief", "--dialect", "verl")
    compared = home.run("compare", first.json["run"], other.json["run"], "-o", "json").json
    cell = next(row for row in compared["metrics"] if row["metric"] == "rows/reward")["values"]["B"]
    assert (cell["difference"], cell["unpaired"]) == (None, "its reward differs from that of A")
    home.run(*asked[:-2], "--reward", "rules.py", "--entry", "digits", "--samples", "2")  # attaches, and reports
    page = (home.root / "runs" / first.json["run"] / "report.html").read_text()
    assert "40 items are scored only by the suite's reward" in page
    assert "lowest rewards: " in page


def test_what_cannot_be_measured_is_one_line(home: Workbench) -> None:
    asked = ("eval", "model:tiny", "./rows.jsonl", "--max-new-tokens", "8")
    assert (
        "rules.py has no function 'digit' (did you mean 'digits'?)"
        in home.run(*asked, "--reward", "rules.py", "--entry", "digit", code=2).error
    )
    assert "--entry needs a reward, got none" in home.run(*asked, "--entry", "digits", code=2).error
    assert "must have an answer" in home.run(*asked, code=2).error
    failed = home.run(*asked, "--reward", "rules.py", "--entry", "much", "-o", "json", code=2)
    assert "must have a score from 0 to 1 (reward_range), got 3 for" in failed.err
    done = home.run(*asked, "--reward", "rules.py", "--entry", "much", "--reward-range", "0", "5", "-o", "json")
    assert done.json["scores"]["evaluate/rows/reward"] == 3.0


JUDGE = """
import os
import urllib.request


def judge(completion):
    key = os.environ["JUDGE_KEY"]
    print("asking with", key)
    asked = urllib.request.Request("http://127.0.0.1:{port}/", headers={{"Authorization": "Bearer " + key}})
    with urllib.request.urlopen(asked) as answer:
        return float(answer.read())
"""


@contextmanager
def judging(key: str) -> Iterator[tuple[int, list[bool]]]:
    """A judge over HTTP that answers whoever has its key; the port, and of each question whether it came with that."""
    asked: list[bool] = []

    class Judge(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"] == f"Bearer {key}")
            self.send_response(200 if asked[-1] else 401)
            self.end_headers()
            self.wfile.write(b"0.5")

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()


def test_audit_29_a_judge_s_key_reaches_its_reward_and_no_record(home: Workbench) -> None:
    key = "sk-judge-0123456789"
    with judging(key) as (port, asked):
        home.write("judge.py", JUDGE.format(port=port))
        use = {"ref": "./judge.py", "network": [f"127.0.0.1:{port}"], "secrets": ["JUDGE_KEY"]}
        suite = {"data": "open", "max_new_tokens": 4, "reward": "judged"}
        stages = {"evaluate": {"kind": "evaluate", "model": "base", "suites": {"open": suite}}}
        spec = {"name": "judged", "owner": "e2e", "seed": 1, "model": "model:tiny", "data": {"open": "./rows.jsonl"}}
        home.write("run.yaml", {**spec, "rewards": {"judged": use}, "stages": stages})
        refused = home.run("run", "run.yaml", code=2)
        assert (
            "secrets: JUDGE_KEY: the driver's environment must contain it, with 8 characters or more" in refused.error
        )
        done = home.run("run", "run.yaml", env={"JUDGE_KEY": key})
    run = home.run_id()
    assert asked
    assert all(asked)
    assert "asking with [JUDGE_KEY]" in home.run("logs", run).out
    texts = [done.out, done.err, *(home.run(verb, run).out for verb in ("get", "why", "lineage"))]
    assert not [text for text in texts if key in text]
    files = [path for path in home.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if key.encode() in path.read_bytes()]
