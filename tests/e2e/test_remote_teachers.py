"""A student learns from a teacher on another server, in the way of a user: a run file, a key, real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from own_models import TINY, with_models
from safetensors.torch import load_file
from served_model import serving
from torch import Tensor
from workbench import PATIENCE, Workbench

from posttrain.domain.jobs import Metric, Note
from posttrain.store.trees import materialise

KEY = {"TEACHER_PASS": "not-for-any-log"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A workspace with a student, a larger teacher, and a model of other tokens."""
    folder = tmp_path_factory.mktemp("taught")
    larger = TINY.model_copy(update={"hidden_size": 32, "intermediate_size": 32})
    other = TINY.model_copy(update={"characters": f"é{TINY.characters}"})
    rows = [{"prompt": f"Q: sort {i}"} for i in range(12)]
    bench = with_models(folder, {"student": TINY, "teacher": larger, "other": other}, rows)
    yield bench
    bench.clean()


def spec(teacher: Any, **changes: Any) -> dict[str, Any]:
    stage = {
        "kind": "distill", "model": "base", "teacher": teacher, "data": "rows", "steps": 4, "prompts_per_step": 6,
        "group_size": 2, "max_new_tokens": 12, "top_k": 8, "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        "runtime": {"micro_batch_tokens": 96, "checkpoint_every": 1}, **changes,
    }  # fmt: skip
    return {
        "name": "taught", "owner": "e2e", "seed": 5, "model": "model:student", "data": {"rows": "rows.jsonl"},
        "stages": {"distill": stage},
    }  # fmt: skip


def at(url: str, **more: Any) -> dict[str, Any]:
    return {"url": f"{url}/v1", "model": "big", **more}


def run(home: Workbench, teacher: Any, **changes: Any) -> str:
    home.write("run.yaml", spec(teacher, **changes))
    home.run("run", "run.yaml", env=KEY)
    return home.run_id()


def weights(home: Workbench, run: str) -> dict[str, Tensor]:
    with home.open() as workspace:
        folder = materialise(workspace.blobs, home.outputs(run)["distill"], home.folder / "looked-at")
    return load_file(folder / "model.safetensors")


def same(home: Workbench, run: str, other: str) -> None:
    found, wanted = weights(home, run), weights(home, other)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def taught(home: Workbench) -> str:
    """A run whose teacher is in the job."""
    return run(home, "model:teacher")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_teacher_at_a_url_teaches_the_same(home: Workbench, taught: str) -> None:
    with serving(home, "model:teacher", "--name", "big") as other:
        teacher = at(other.url, key="TEACHER_PASS")
        home.write("run.yaml", spec(teacher))
        planned = home.run("plan", "run.yaml", "-o", "json", env=KEY).json
        [warning] = [one for one in planned["warnings"] if "pin" in one]
        told = f"distill: teacher is the model big at {other.url}/v1; the manifest does not pin it, so another run may"
        assert warning.startswith(told)
        found = run(home, teacher)
        assert f"teacher at {other.url}/v1: big, digest sha256:" in log(home, found)
        shown = home.run("plan", "run.yaml", env=KEY).out
        assert f"teacher: big at {other.url}/v1  not pinned" in shown
        assert f"teacher: big at {other.url}/v1, not pinned" in home.run("lineage", found).out
        home.write("other.yaml", {**spec(teacher), "name": "again"})
        assert home.run("plan", "other.yaml", "-o", "json", env=KEY).json["stages"][0]["cached_from"] is None
    same(home, found, taught)
    assert agreement(home, found) == pytest.approx(agreement(home, taught), abs=1e-6)
    for path in (file for file in (home.root / "runs" / found).rglob("*") if file.is_file()):
        assert b"not-for-any-log" not in path.read_bytes(), path


def agreement(home: Workbench, run: str) -> list[float]:
    """Of each step; a step that was computed again counts twice."""
    facts = [fact for one in home.attempts(run, "distill") for fact in home.facts(one)]
    return [one.values["agreement"] for one in facts if isinstance(one, Metric) and "agreement" in one.values]


def log(home: Workbench, run: str) -> str:
    logs = [home.root / one.folder / "log.txt" for one in home.attempts(run, "distill")]
    return "".join(path.read_text() for path in logs if path.exists())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_server_that_is_killed_and_started_again_teaches_on(home: Workbench) -> None:
    whole = run(home, "model:teacher", steps=12)
    started = home.run_ids()
    with serving(home, "model:teacher", "--name", "big") as other:
        home.write("run.yaml", spec(at(other.url), steps=12))
        process = home.start("run", "run.yaml")
        found = home.wait_run(started)
        home.wait("a step", lambda: len(agreement(home, found)) > 2)
        other.process.kill()
        other.process.wait(PATIENCE)
        home.wait("a request in vain", lambda: "does not answer" in log(home, found))
    with serving(home, "model:teacher", "--name", "big", port=other.url.rpartition(":")[2]):
        done = home.finish(process)
        assert done.code == 0, done.err
    assert len(agreement(home, found)) == 12, "no step was computed again"
    (attempt,) = home.attempts(found, "distill")
    notes = [fact.message for fact in home.facts(attempt) if isinstance(fact, Note)]
    assert [line.split("/v1 ")[1][:15] for line in notes if "/v1 " in line] == ["does not answer", "answers again a"]
    same(home, found, whole)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_wrong_server_is_one_line(home: Workbench) -> None:
    with serving(home, "model:other", "--name", "big") as other:
        for teacher, told in (
            (at(other.url), "must have the student's tokenizer, but it tokenizes 'Q: sort 0' differently (from token "),
            ({"url": other.url, "model": "big"}, "refused /models with status 404: "),
            ({**at(other.url), "model": "huge"}, "must serve the model huge, got big; correct `model`"),
        ):
            home.write("run.yaml", spec(teacher))
            failed = home.run("run", "run.yaml", code=None)
            assert failed.code != 0
            assert told in failed.out + failed.err
    home.write("run.yaml", spec(at("http://127.0.0.1:9", key="TEACHER_PASS")))
    assert "TEACHER_PASS: the driver's environment must contain it" in home.run("run", "run.yaml", code=2).error


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_another_attempt_needs_the_same_teacher(home: Workbench) -> None:
    started = home.run_ids()
    with serving(home, "model:teacher", "--name", "big") as other:
        port = other.url.rpartition(":")[2]
        home.write("run.yaml", {**spec(at(other.url), steps=2000), "name": "swapped"})
        process = home.start("run", "run.yaml")
        found = home.wait_run(started)
        home.wait("a step", lambda: len(agreement(home, found)) > 1)
        other.process.kill()
        other.process.wait(PATIENCE)
        home.wait("a request in vain", lambda: "does not answer" in log(home, found))
        home.run("stop", found)
        assert "was killed" not in home.finish(process).out
    with serving(home, "model:student", "--name", "big", port=port):
        failed = home.run("retry", found, code=None)
    assert failed.code != 0
    assert "or a server has another model than before, now teacher at " in failed.out + failed.err


@pytest.mark.ray
@pytest.mark.timeout(3000)
def test_a_teacher_at_a_url_has_ranks_of_its_own(home: Workbench, taught: str) -> None:
    apart = {"policy": {"ranks": 1}, "rollout": {"ranks": 1}, "teacher": {"ranks": 2}}
    with serving(home, "model:teacher", "--name", "big") as other:
        found = run(home, at(other.url), placement=apart)
    same(home, found, taught)
    (attempt,) = home.attempts(found, "distill")
    told = [fact.message for fact in home.facts(attempt) if isinstance(fact, Note)]
    assert any("teacher (2)" in line for line in told), told


@pytest.mark.parametrize(
    ("teacher", "changes", "told"),
    [
        (at("http://h"), {"temperature": 0.7}, "temperature must be 1 with teacher at a url, whose server computes"),
        ({"serve": "model:teacher"}, {}, "teacher: must be a model, or have a url, got serve; write model:teacher"),
        (
            {"url": "ftp://me:pass@h"},
            {},
            "teacher.url: must have the form https://HOST:PORT/v1 or http://HOST:PORT/v1,",
        ),
        (at("http://h", key="sk-aBc123"), {}, "teacher.key: must be the name of an environment variable in capital"),
        (at("http://h"), {"top_k": 63}, "top_k: must be at most 62, the size of the vocabulary, got 63"),
        ({**at("http://h"), "context": 8}, {}, "context needs serve; remove context"),
        (3, {}, "teacher: must be a model, or a map such as {url: https://HOST/v1, model: NAME}, got 3"),
    ],
)
def test_what_makes_no_sense_is_refused(home: Workbench, teacher: Any, changes: dict[str, Any], told: str) -> None:
    home.write("run.yaml", spec(teacher, **changes))
    line = home.run("plan", "run.yaml", code=2).error
    assert told in line
    assert "aBc123" not in line
    assert "pass@" not in line
