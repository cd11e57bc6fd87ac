"""A reward's secret: its name is recorded and pinned, its value is looked for before anything is submitted."""

from __future__ import annotations

import contextlib
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cli_world import RUN, World, make_world

from posttrain.app.workspace import open_workspace
from posttrain.data.refs import confined
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import InputBlob, JobOrder, JobResult
from posttrain.domain.jobspec import JobSpec
from posttrain.events.ports import SECRETS, secrets_of
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.execution.processes import of_a_server
from posttrain.jobs import entry
from posttrain.jobs.bodies.rewards import _open
from posttrain.preflight.confinement import refuse_missing_secrets
from posttrain.store.attempts import AttemptFolder

KEY = "sk-0123456789-abcdef"
JUDGED = RUN.replace("{exact: reward:sort}", "{exact: {ref: reward:sort, secrets: [JUDGE_KEY]}}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    made.write("run.yaml", JUDGED)
    return made


@pytest.mark.parametrize("value", [None, "", "short", "  a\n     b "])
def test_audit_29_a_secret_that_is_not_set_is_refused_before_anything_is_submitted(
    world: World, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    for verb in ("plan", "run"):
        told = world(verb, "run.yaml")
        assert (told.exit_code, len(told.stderr.splitlines())) == (2, 1)
        assert (
            "stages.grpo: reward:sort@1: secrets: JUDGE_KEY: the driver's environment must contain it, with 8"
            in told.stderr
        )
    assert world.json("ls")["runs"] == []


def test_audit_29_only_its_name_is_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    world.ok("run", "run.yaml")
    files = [path for path in world.root.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    with contextlib.closing(open_workspace()) as workspace:
        manifest = workspace.stores.manifest(workspace.ledger.run(world.newest()))
        assert manifest.stage("grpo").inputs["reward"].meta["secrets"] == ["JUDGE_KEY"]
    asked = {json.loads(path.read_text())["labels"]["stage"]: path for path in files if path.name == "request.json"}
    named = {stage: json.loads(path.read_text())["secrets"] for stage, path in asked.items()}
    assert named["grpo"] == ["JUDGE_KEY"]
    assert named["sft"] == named["evaluate"] == []


def test_a_measurement_without_a_run_file_names_what_its_reward_gets(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = ("eval", "model:tiny", "heldout", "--secret", "JUDGE_KEY", "--network", "127.0.0.1:8000")
    told = world(*measure)
    assert (told.exit_code, "--network needs a reward, got none" in told.stderr) == (2, True)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    told = world(*measure, "--reward", "sort")
    assert (told.exit_code, "secrets: JUDGE_KEY: the driver's environment must contain it, with 8" in told.stderr) == (
        2,
        True,
    )
    assert world.json("ls")["runs"] == []
    monkeypatch.setenv("JUDGE_KEY", KEY)
    run = world.json(*measure, "--reward", "sort")["run"]
    with contextlib.closing(open_workspace()) as workspace:
        inputs = workspace.stores.manifest(workspace.ledger.run(run)).stages[0].inputs
    meta = next(one.meta for slot, one in inputs.items() if "reward" in slot)
    assert (meta["secrets"], meta["network"]) == (["JUDGE_KEY"], ["127.0.0.1:8000"])


def test_audit_29_a_lock_is_held_against_it_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    world.ok("lock", "run.yaml")
    monkeypatch.delenv("JUDGE_KEY")
    told = world("run", "run.lock.json")
    assert (told.exit_code, "secrets: JUDGE_KEY: the driver's environment must contain it, with 8" in told.stderr) == (
        2,
        True,
    )


def test_audit_29_a_server_gives_a_secret_to_the_project_that_its_configuration_names(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    world.ok("run", "run.yaml")
    with contextlib.closing(open_workspace()) as workspace:
        manifest = workspace.stores.manifest(workspace.ledger.run(world.newest()))
        for listed in ("", "bens/JUDGE_KEY", "default/JUDGE_KEY_2"):
            monkeypatch.setenv(SECRETS, listed)
            with (
                confined(world.root),
                pytest.raises(InputError, match=f"the server's {SECRETS} must contain default/JUDGE_KEY"),
            ):
                refuse_missing_secrets(workspace, manifest, Path("run.yaml"))
        monkeypatch.setenv(SECRETS, "bens/OTHER,default/JUDGE_KEY")
        with confined(world.root):
            refuse_missing_secrets(workspace, manifest, Path("run.yaml"))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "judge_key",
            "PYTHONPATH",
            "POSTTRAIN_SINK_CHAT",
            "LD_PRELOAD",
            "PGPASSWORD",
            "A-B",
            "PATH",
            "HOME",
            "HF_HOME",
        ),
        *("AWS_SECRET_ACCESS_KEY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HTTPS_PROXY"),
    ],
)
def test_audit_29_names_that_are_no_secrets_of_a_reward_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(SECRETS, f"default/{name}")
    with (
        pytest.raises(InputError, match=f"got the entry default/{name}; correct it")
        if "SINK" not in name
        else nullcontext()
    ):
        secrets_of("default")
    world.write("run.yaml", JUDGED.replace("JUDGE_KEY", name))
    told = world("plan", "run.yaml")
    assert (told.exit_code, len(told.stderr.splitlines()), "secrets" in told.stderr) == (2, 1, True)


def test_audit_29_a_lock_does_not_name_what_a_run_file_may_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    world.ok("run", "run.yaml")
    with contextlib.closing(open_workspace()) as workspace:
        manifest = workspace.stores.manifest(workspace.ledger.run(world.newest()))
        stages = [stage for stage in manifest.stages if stage.name == "grpo"]
        stages[0].inputs["reward"].meta["secrets"][:] = ["PATH"]
        with pytest.raises(InputError, match="secrets: PATH: other programs or stores read this variable"):
            refuse_missing_secrets(workspace, manifest, Path("run.lock.json"))


def test_audit_29_a_job_gets_the_secrets_that_it_names_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("OTHER_KEY", KEY)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    executor = LocalExecutor(keep=of_a_server)
    request = JobSpec("j", tmp_path.as_uri(), "m", {}, secrets=("JUDGE_KEY", "WANDB_API_KEY"))
    assert {name for name, value in executor._own(request).items() if value == KEY} == {"JUDGE_KEY"}


def test_audit_29_a_secret_leaves_the_job_s_environment_before_anybody_s_code_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    seen: dict[str, Any] = {}

    def body(job: entry.Job) -> JobResult:
        seen.update(environment=os.environ.get("JUDGE_KEY"), secrets=dict(job.secrets), shown=repr(job))
        return JobResult("succeeded")

    blob = InputBlob("sha256:" + "0" * 64, "file", meta={"secrets": ["JUDGE_KEY"]})
    folder = AttemptFolder(tmp_path / "attempt")
    folder.path.mkdir()
    folder.write_order(
        JobOrder("j", "grpo", 1, {}, {"reward": blob}, f"file://{tmp_path}/store", str(tmp_path / "cache"))
    )
    assert entry.run(str(folder.path), body) == 0
    assert (seen["environment"], seen["secrets"]) == (None, {"JUDGE_KEY": KEY})
    assert KEY not in seen["shown"]


def test_audit_29_a_job_without_it_ends_in_one_line() -> None:
    blob = InputBlob("sha256:" + "0" * 64, "file", meta={"secrets": ["JUDGE_KEY"]})
    job: Any = SimpleNamespace(order=SimpleNamespace(inputs={"reward": blob}), secrets={}, label=lambda slot: slot)
    with pytest.raises(InputError, match="reward needs JUDGE_KEY in the environment of the run's driver"):
        _open(job, "reward", "exact", None, 1.0, 1, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(("word", "good"), [("127.0.0.1:8000", True), ("localhost:8000", True), ("10.0.0.1:80", False)])
def test_audit_29_the_loopback_address_is_accepted_where_localhost_is(world: World, word: str, good: bool) -> None:
    spec = yaml.safe_load(RUN)
    spec["rewards"] = {"exact": {"ref": "reward:sort", "network": [word]}}
    told = world("plan", world.write("run.yaml", yaml.safe_dump(spec)))
    assert told.exit_code == (0 if good else 2)
    assert good or "or 127.0.0.1, got '10.0.0.1:80'" in told.stderr
