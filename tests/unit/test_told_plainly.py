"""What commands say where a stranger would be misled: states, whose turn it is, what is missing, where to look."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from cli_world import GOOD_REWARD, RUN, World, make_world
from console_bench import Browser
from server_bench import serving
from test_approvals import ONE, waits
from test_channel_policies import policy_file

from posttrain.app.doctor import remote_checks
from posttrain.app.workspace import open_workspace
from posttrain.domain.errors import ConflictError, NotFoundError
from posttrain.domain.ids import Role
from posttrain.server.service import _alone
from posttrain.store.atomic import write_json
from posttrain.views.status import read_status


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "eve")
    made.prepare()
    return made


def asked(world: World, run: str) -> str:
    """What its release says to do next."""
    return next(str(one["next_action"]) for one in world.json("get", run)["stages"] if one["name"] == "release")


def test_a_run_that_waits_for_approval_says_so_and_who_may_is_told_to(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    assert "waits for approval" in world.ok("ls")
    (reason,) = [line for line in world.ok("why", run).splitlines() if line.startswith("reason: ")]
    assert "stage release needs 1 approval" in reason
    assert reason.endswith("(WaitingForApproval)")  # as docs/howto/release.md says
    assert world.json("get", run)["standing"] == "waits for approval"
    assert world.json("get", run)["state"] == "running"
    command = f"posttrain approve {run} --channel prod"
    assert asked(world, run) == f"user:ann or user:bob may run: {command}"
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "ann")
    assert asked(world, run) == command


def test_approvers_without_the_role_are_told(world: World) -> None:
    world.ok("member", "set", "user:eve", "admin")
    world.ok("member", "set", "user:ann", "submitter")
    world.ok("member", "set", "user:bob", "approver")
    said = world("channel", "set-policy", "prod", policy_file(world, **ONE))
    assert said.exit_code == 0
    assert "user:ann is submitter here and may not approve; posttrain member set user:ann approver" in said.stderr
    assert "user:bob" not in said.stderr


def test_a_role_that_is_none_lists_its_choices_once(world: World) -> None:
    said = world("member", "set", "user:ann", "boss").stderr
    assert said.count("submitter") == 1
    assert "did you mean 'viewer'" in world("member", "set", "user:ann", "viewr").stderr


def test_a_sink_without_its_secret_does_not_deliver(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_SINK_HOOK", raising=False)
    world.ok("sink", "add", "team", "--webhook", "https://hooks.example.org/x", "--secret-env", "POSTTRAIN_SINK_HOOK")
    said = world.ok("sink", "ls")
    assert "cannot deliver" in said
    assert "variable POSTTRAIN_SINK_HOOK is not set" in said
    plan = world.ok("plan", "run.yaml")
    assert "sink team: variable POSTTRAIN_SINK_HOOK is not set" in " ".join(plan.split())
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK", "whsec_" + "a" * 32)
    assert "cannot deliver" not in world.ok("sink", "ls")
    assert "POSTTRAIN_SINK_HOOK" not in world.ok("plan", "run.yaml")


def test_a_workspace_beside_the_server_that_commands_ask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    world = make_world(tmp_path / "new", monkeypatch)
    monkeypatch.setenv("POSTTRAIN_SERVER", "https://posttrain.example.org")
    said = world("init")
    assert said.exit_code == 2
    assert "POSTTRAIN_SERVER names, https://posttrain.example.org" in said.stderr
    assert list(world.root.glob(".posttrain")) == []


def test_doctor_looks_at_the_server_that_commands_ask(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(open_workspace(world.root)) as bench:
        secret = bench.person("ann", Role.SUBMITTER)
        monkeypatch.setenv("POSTTRAIN_SERVER", bench.url)
        monkeypatch.setenv("POSTTRAIN_TOKEN", secret)
        found = {one.name: (one.state, one.finding) for one in remote_checks(bench.url)}
        assert {name: state for name, (state, _) in found.items()} == dict.fromkeys(found, "ok")
        assert found["token"][1] == "user:ann, submitter of default"
        assert set(found) == {"server", "ready", "clock", "token"}
        monkeypatch.setenv("POSTTRAIN_TOKEN", "ptt_none")
        told = world("doctor")
        assert told.exit_code == 10
        assert f"posttrain login {bench.url}" in told.stdout
        assert "workspace" not in [line.split()[2] for line in told.stdout.splitlines() if line.count(" ") > 3]
        monkeypatch.setattr("posttrain.app.doctor.time.time", lambda: 0.0)
        assert {one.name: one.state for one in remote_checks(bench.url)}["clock"] == "warn"
    (gone,) = remote_checks(bench.url)
    assert (gone.name, gone.state) == ("server", "fail")


def test_who_serves_a_workspace_is_named(world: World) -> None:
    root = world.root / ".posttrain"
    with _alone(root):
        write_json(root / "server.json", {"url": "http://127.0.0.1:1", "key": "k", "pid": 4711})
        with pytest.raises(ConflictError) as refused, _alone(root):
            pass
    said = str(refused.value)
    assert "is served already, by process 4711 at http://127.0.0.1:1; end that server first" in said


def test_a_stage_is_starting_until_its_job_says_something(world: World) -> None:
    world.hold.add("sft")
    assert world("run", "run.yaml", "--timeout", "20").exit_code == 12
    run = world.newest()
    workspace = open_workspace(world.root)
    status = read_status(workspace, run, brief=True)
    stage = next(one for one in status.stages if one.record.name == "sft")
    assert stage.record.state == "running"
    assert (stage.standing, status.standing) == ("starting", "starting")
    workspace.close()


@pytest.mark.slow
def test_runs_without_scores_are_not_offered_to_be_compared(world: World) -> None:
    world.ok("run", "run.yaml")
    alone = world.write("alone.yaml", _without_scores())
    world.ok("run", alone)
    lone = world.newest()
    with serving(open_workspace(world.root)) as bench:
        browser = Browser(bench)
        assert browser.log_in(bench.person("ann", Role.VIEWER)).status == 303
        page = browser.get("/projects/default/compare").body.decode()
    assert lone not in page
    assert page.count('type="checkbox"') == 1
    assert "1 run that ended without scores is left out" in page


def _without_scores() -> str:
    import yaml
    from cli_world import RUN

    raw = yaml.safe_load(RUN)
    raw["name"] = "alone"
    raw["stages"] = {"sft": raw["stages"]["sft"] | {"steps": 5}}
    for key in ("gates", "release", "rewards"):
        raw.pop(key)
    return str(yaml.safe_dump(raw))


def test_whoever_waits_for_a_first_model_is_told_for_what(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr("posttrain.cli.assets._QUIET", 0.0)
    monkeypatch.setattr("posttrain.cli.console.aside", lambda line: (said.append(line), told.set()))
    said: list[str] = []

    def made(workspace: object, *_: object) -> None:
        assert told.wait(60)
        raise NotFoundError("enough")

    monkeypatch.setattr("posttrain.app.models.create_model", made)
    world("asset", "create", "model:tiny", world.write("model.yaml", "{}"))
    assert said[0].startswith("creating model:tiny in a run with one stage")


def test_a_model_whose_run_failed_is_made_by_the_same_command(world: World) -> None:
    world.ok("init")
    words = ("asset", "create", "model:small", world.write("model.yaml", "layers: 1"))
    world.broken["init_model"] = [1, 1]
    assert world(*words).exit_code == 6
    assert "model:small@1" in world.ok(*words)
    assert "model:small@1" in world.ok(*words), "and no other one is made"
    assert [one["state"] for one in world.json("ls")["runs"]] == ["succeeded", "failed"]


def test_a_second_workspace_is_made_only_where_its_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.ok("init")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    said = world("init")
    assert said.exit_code == 2
    assert f"commands here use the workspace {tmp_path / '.posttrain'} already" in said.stderr
    assert said.stderr.rstrip().endswith("posttrain init .")
    assert list(Path().iterdir()) == []
    world.ok("ls")  # as it says: of the workspace above
    made = world("init", ".")
    assert made.exit_code == 0
    assert f"the new workspace is below the workspace {tmp_path / '.posttrain'}" in made.stderr
    assert world("init", "--executor", "local").exit_code == 0  # of the one that is here now
    monkeypatch.chdir(tmp_path)
    assert world("init").stderr == ""


@pytest.mark.slow
def test_a_run_that_only_a_person_keeps_does_not_hold_the_executor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    waits(world)
    monkeypatch.setattr("posttrain.app.workspace.containers.trouble", lambda: "")
    assert "executor" in world.ok("init", "--executor", "podman")
    world.ok("init", "--executor", "local")
    world.hold.add("grpo")
    world.write("run.yaml", RUN.replace("seed: 17", "seed: 18"))
    assert world("run", "run.yaml", "--timeout", "20").exit_code == 12
    said = world("init", "--executor", "podman")
    assert said.exit_code == 9
    assert f"({world.newest()}), got podman" in said.stderr
    assert f"posttrain stop {world.newest()}" in said.stderr


def test_jobs_of_every_project_hold_the_executor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.app.workspace.containers.trouble", lambda: "")
    world.ok("project", "add", "other")
    monkeypatch.setenv("POSTTRAIN_PROJECT", "other")
    files = {"dataset:train": "train.jsonl", "dataset:heldout": "heldout.jsonl", "model:tiny": "base"}
    for ref, file in {**files, "reward:sort": "reward.py"}.items():
        world.ok("asset", "add", ref, file)
    world.hold.add("sft")
    assert world("run", "run.yaml", "--timeout", "20").exit_code == 12
    held = world.newest()
    monkeypatch.delenv("POSTTRAIN_PROJECT")
    said = world("init", "--executor", "podman")
    assert said.exit_code == 9
    assert held in said.stderr


def console_page(world: World, place: str, name: str = "lou") -> str:
    """A page of the console, as a viewer sees it."""
    with serving(open_workspace(world.root)) as bench:
        browser = Browser(bench)
        assert browser.log_in(bench.person(name, Role.VIEWER)).status == 303
        return browser.get(f"/projects/default/{place}").body.decode()


@pytest.mark.slow
def test_what_was_released_asks_nobody_to_approve_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "ann")
    world.ok("approve", run)
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "eve")
    world.ok("attach", run)
    assert asked(world, run) == "none needed"
    workspace = open_workspace(world.root)
    rows = workspace.ledger.stages(run)
    workspace.close()
    assert [row.next_action for row in rows if row.name == "release"] == [""]
    assert "posttrain approve" not in console_page(world, f"runs/{run}")


def test_a_stage_of_the_console_is_starting_until_its_job_says_something(world: World) -> None:
    world.hold.add("sft")
    assert world("run", "run.yaml", "--timeout", "20").exit_code == 12
    page = console_page(world, f"runs/{world.newest()}")
    stages = page[page.index("<h2>Stages</h2>") :]
    assert re.findall(r'class="how"><span class="badge \w*">(\w+)<', stages)[0] == "starting"


@pytest.mark.slow
def test_a_model_that_was_brought_back_is_not_called_rolled_back(world: World) -> None:
    world.ok("run", "run.yaml")
    world.ok("asset", "add", "reward:sort", world.write("reward.py", GOOD_REWARD.replace("1.0", "0.97")))
    world.ok("run", "run.yaml")
    world.ok("rollback", "prod")
    page = " ".join(console_page(world, "channels/prod").split())
    served = page[page.index("Live release") : page.index("<h2>Policy</h2>")]
    assert "brought back" in served
    assert "rolled back" not in served
    assert ">quarantined</span>" in page
    assert page.count(">rolled back</span>") == 1  # the move that was taken back
