"""Executors of installed packages: chosen by a workspace, loaded when a job is submitted or looked for, and never
believed where their code breaks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world
from control_bench import TRAIN_ONLY, Bench
from installed import install, on_path

from posttrain.app.doctor import _packages
from posttrain.app.workspace import open_workspace
from posttrain.control.plan import submit
from posttrain.control.reconciler import Reconciler
from posttrain.domain import plugins
from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.domain.jobs import Accepted, Capacity, Unknown
from posttrain.domain.jobspec import JobRef, JobSpec
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.execution.installed import InstalledExecutor
from posttrain.execution.ports import Executor

POINTS = "[posttrain.executors]\nfar = {module}:Far\n"
FAR = """
    from posttrain.execution.executors.fake import FakeExecutor

    class Far(FakeExecutor):
        name = "far"
        idempotent = True

        def __init__(self, runs):
            super().__init__()
"""
JOB = JobRef("run-s-1", "file:///nowhere")
REQUEST = JobSpec("run-s-1", "file:///nowhere", "m")


@pytest.fixture(autouse=True)
def _look_anew() -> Iterator[None]:
    yield
    plugins._scan.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    on_path(monkeypatch, tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def far(site: Path, module: str, source: str = FAR, more: str = "") -> InstalledExecutor:
    install(site, "posttrain-far", "1.0", POINTS.format(module=module), {f"{module}.py": source + more})
    return InstalledExecutor("far", ["local"], site)


def test_an_executor_of_an_installed_package_is_an_executor(site: Path) -> None:
    executor: Executor = far(site, "far_whole")
    assert (executor.name, executor.attests, executor.idempotent) == ("far", False, True)
    assert isinstance(executor.submit(REQUEST), Accepted)
    assert executor.observe([JOB])[0].live
    assert [job.name for job in executor.list("run-")] == ["run-s-1"]
    assert executor.logs(JOB).text == ""
    assert executor.capacity() == Capacity()
    executor.kill(JOB)
    assert executor.observe([JOB])[0].gone


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise OSError('no\\nlicence')", "raised OSError: no licence"),
        ("Far = 3", "must name a class or a function that creates an executor, got 3"),
        ("class Far:\n    name = 'far'\n    def __init__(self, runs): pass", "lacks submit, observe, kill"),
        ("class Far:\n    pass", "making it raised TypeError"),
        (FAR.replace('"far"', '"near"'), "must be named like the entry point, got 'near'"),
    ],
    ids=["raises", "no-class", "no-executor", "no-argument", "other-name"],
)
def test_a_broken_package_is_one_line_that_names_it(
    site: Path, source: str, says: str, request: pytest.FixtureRequest
) -> None:
    executor = far(site, f"far_broken_{request.node.callspec.id.replace('-', '_')}", source)
    for refused, ask in ((InputError, executor.load), (InfrastructureError, lambda: executor.observe([JOB]))):
        with pytest.raises(refused) as caught:
            ask()
        assert str(caught.value).startswith("executor 'far' of posttrain-far 1.0: ")
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


_BREAKS = """
        def {verb}(self, *words):
            return {what}
"""


@pytest.mark.parametrize(("what", "says"), [("words['x']", "submit raised TypeError"), ("'yes'", "got 'yes'")])
def test_a_submission_that_breaks_is_unknown(site: Path, what: str, says: str) -> None:
    executor = far(site, f"far_submits_{len(says)}", more=_BREAKS.format(verb="submit", what=what))
    answer = executor.submit(REQUEST)
    assert isinstance(answer, Unknown)
    assert says in answer.detail


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("observe", "[]"),
        ("observe", "['gone']"),
        ("observe", "1 / 0"),
        ("kill", "{}['x']"),
        ("list", "1 / 0"),
        ("logs", "1 / 0"),
        ("capacity", "1 / 0"),
    ],
)
def test_what_breaks_elsewhere_says_nothing_of_the_job(
    site: Path, verb: str, what: str, request: pytest.FixtureRequest
) -> None:
    module = "far_says_" + "".join(c if c.isalnum() else "_" for c in request.node.callspec.id)
    executor = far(site, module, more=_BREAKS.format(verb=verb, what=what))
    words: dict[str, Any] = {"observe": [[JOB]], "kill": [JOB], "list": [""], "logs": [JOB], "capacity": []}
    with pytest.raises(InfrastructureError, match=f"executor 'far' of posttrain-far 1.0: {verb} raised"):
        getattr(executor, verb)(*words[verb])


def test_a_workspace_chooses_its_executor(world: World, site: Path) -> None:
    far(site, "far_chosen")
    assert "executor far" in world.ok("init", "--executor", "far")
    with closing(open_workspace(world.root)) as workspace:
        assert workspace.jobs.executor.name == "far"
    world.ok("plan", "run.yaml")
    assert "executor 'far' of posttrain-far 1.0" in _packages().finding
    world.ok("init", "--executor", "local")
    assert "executor" not in json.loads((world.root / ".posttrain" / "workspace.json").read_bytes())


def test_an_unknown_executor_is_refused_with_the_nearest_name(world: World, site: Path) -> None:
    far(site, "far_nearest")
    refused = world("init", "--executor", "fra")
    assert refused.exit_code == 2
    assert "executor 'fra' must be installed (did you mean 'far'?)" in refused.stderr


def test_an_executor_that_was_uninstalled_refuses_plans_and_hinders_no_look(world: World, site: Path) -> None:
    far(site, "far_gone")
    world.ok("init", "--executor", "far")
    for path in site.glob("posttrain_far-*/*"):
        path.unlink()
    plugins._scan.cache_clear()
    for words in (("plan", "run.yaml"), ("run", "run.yaml")):
        refused = world(*words)
        assert refused.exit_code == 2
        assert "executor 'far' must be installed (known: local, podman)" in refused.stderr
    world.ok("ls")
    told = world("doctor")
    assert told.exit_code == 10
    assert "fix this; until then, no job starts" in told.stdout


def test_a_workspace_does_not_change_its_executor_under_a_run(world: World, site: Path) -> None:
    far(site, "far_under")
    world.ok("run", "run.yaml")
    with closing(open_workspace(world.root)) as workspace:
        [made] = workspace.ledger.runs()
        again = submit(workspace.stores, workspace.stores.manifest(made), again=True).run.id
    refused = world("init", "--executor", "far")
    assert refused.exit_code == 9
    assert f"executor must remain fake while runs have jobs or may start some ({again}), got far;" in refused.stderr
    assert f"stop them: posttrain stop {again}" in refused.stderr
    world.ok("stop", again)
    world("attach", again)
    assert "executor far" in world.ok("init", "--executor", "far")


def test_a_driver_with_another_executor_does_not_take_its_jobs_for_lost(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"sft": [None]})
    run_id = bench.submit(**TRAIN_ONLY)
    while not bench.launched:
        bench.reconciler.tick(run_id)
    other = FakeExecutor(now=bench.clock.now)
    other.name = "far"  # type: ignore[misc]
    strange = Reconciler(bench.stores, replace(bench.jobs, executor=other), "there", alive=lambda owner: False)
    strange.tick(run_id)
    [attempt] = bench.ledger.attempts(run_id)
    assert attempt.state == "launched"
    assert other.launched == []
    assert "submitted to executor fake, but this process uses far" in bench.stage(run_id, "sft").message
