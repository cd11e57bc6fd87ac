"""What a run says of its rewards' surroundings, through the command line: files, hosts, trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_world import World, make_world

from posttrain.app.workspace import open_workspace

LOST = {"whole": False, "notes": ["no namespaces (Operation not permitted)"]}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture
def unconfined(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.preflight.confinement._ask", lambda: LOST)


def declare(world: World, **use: object) -> None:
    text = (world.root / "run.yaml").read_text()
    line = next(line for line in text.splitlines() if "reward:sort" in line)
    assert line.strip().startswith(("rewards:", "exact:"))
    world.write("run.yaml", text.replace("reward:sort", json.dumps({"ref": "reward:sort", **use})))


class TestTrust:
    @pytest.mark.usefixtures("unconfined")
    @pytest.mark.parametrize("verb", ["plan", "run", "lock"])
    def test_what_cannot_be_confined_is_refused_with_nothing_written(self, world: World, verb: str) -> None:
        result = world(verb, "run.yaml")
        assert result.exit_code == 2
        assert "rewards and observe must be confined, which is not possible here: no namespaces" in result.stderr
        assert "posttrain init --rewards trusted" in result.stderr
        assert world.json("ls")["runs"] == []

    @pytest.mark.usefixtures("unconfined")
    def test_a_workspace_that_trusts_them_runs_and_is_told(self, world: World) -> None:
        assert "rewards are trusted in this workspace" in world.ok("init", "--rewards", "trusted")
        assert "rewards are trusted in this workspace" in world.ok("init"), "it stays so"
        plan = world.json("plan", "run.yaml")
        assert any("trusts them: no namespaces" in warning for warning in plan["warnings"])
        world.ok("run", "run.yaml")
        orders = [json.loads(path.read_bytes()) for path in world.root.glob(".posttrain/runs/*/grpo/*/job.json")]
        assert [order["trust_rewards"] for order in orders] == [True]
        assert "trusted" not in world.ok("init", "--rewards", "confined")
        assert world("plan", "run.yaml").exit_code == 2

    def test_where_they_can_nothing_is_said_and_no_job_is_trusted(self, world: World) -> None:
        assert not [w for w in world.json("plan", "run.yaml")["warnings"] if "confined" in w]
        world.ok("run", "run.yaml")
        orders = [json.loads(path.read_bytes()) for path in world.root.glob(".posttrain/runs/*/grpo/*/job.json")]
        assert [order["trust_rewards"] for order in orders] == [False]

    @pytest.mark.usefixtures("unconfined")
    def test_a_run_without_rewards_needs_no_cell(self, world: World) -> None:
        text = (world.root / "run.yaml").read_text()
        begin, end = text.index("  grpo:"), text.index("  evaluate:")
        world.write("run.yaml", (text[:begin] + text[end:]).replace("model: grpo", "model: sft"))
        assert world("plan", "run.yaml").exit_code == 0, world("plan", "run.yaml").stderr

    @pytest.mark.usefixtures("unconfined")
    @pytest.mark.parametrize("turns", ["", ", turns: 2, observation_tokens: 4"])
    def test_a_run_that_observes_needs_a_cell(self, world: World, turns: str) -> None:
        text = (world.root / "run.yaml").read_text()
        begin, end = text.index("  grpo:"), text.index("  evaluate:")
        talk = f'  talk: {{kind: dataflow, recipe: "talk:Talk", model: sft, data: train, steps: 1{turns}}}\n'
        world.write("talk.py", "class Talk:\n    pass\n")
        world.write("run.yaml", (text[:begin] + talk + text[end:]).replace("model: grpo", "model: talk"))
        result = world("plan", "run.yaml")
        assert result.exit_code == (2 if turns else 0), result.stderr
        assert ("stages talk: rewards and observe must be confined" in result.stderr) == bool(turns)

    @pytest.mark.usefixtures("unconfined")
    def test_doctor_tells(self, world: World) -> None:
        [check] = [check for check in world.json("doctor") if check["name"] == "rewards"]
        assert (check["state"], check["finding"]) == ("warn", "no namespaces (Operation not permitted)")

    def test_asked_once_a_boot(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        world.ok("plan", "run.yaml")
        monkeypatch.setattr("posttrain.preflight.confinement._ask", lambda: pytest.fail("asked again"))
        world.ok("plan", "run.yaml")
        monkeypatch.setattr("posttrain.preflight.confinement._machine", lambda: "another-boot")
        monkeypatch.setattr("posttrain.preflight.confinement._ask", lambda: LOST)
        assert world("plan", "run.yaml").exit_code == 2


class TestDeclared:
    @pytest.mark.slow
    def test_files_are_pinned_and_published(self, world: World) -> None:
        world.write("words.txt", "one")
        (world.root / "lists").mkdir()
        world.write("lists/b.txt", "two")
        declare(world, files=["words.txt", "lists"], network=["judge.test:8000"])
        first = world.json("plan", "run.yaml")
        [stage] = [stage for stage in first["manifest"]["stages"] if stage["name"] == "grpo"]
        assert stage["inputs"]["reward"]["meta"]["network"] == ["judge.test:8000"]
        assert stage["inputs"]["reward/words.txt"]["form"] == "file"
        assert stage["inputs"]["reward/lists"]["form"] == "tree"
        world.ok("run", "run.yaml")
        workspace = open_workspace(world.root)
        assert workspace.blobs.get(stage["inputs"]["reward/words.txt"]["digest"]) == b"one"
        workspace.close()
        assert world.json("plan", "run.yaml")["stages"][1]["cached_from"]
        world.write("words.txt", "three")
        later = world.json("plan", "run.yaml")
        assert later["digest"] != first["digest"]
        assert later["stages"][1]["cached_from"] is None, "another file is another reward"

    def test_another_host_is_another_result(self, world: World) -> None:
        world.ok("run", "run.yaml")
        declare(world, network=["judge.test:8000"])
        assert world.json("plan", "run.yaml")["stages"][1]["cached_from"] is None

    @pytest.mark.parametrize(
        ("use", "words"),
        [
            ({"files": ["absent.txt"]}, "absent.txt: no such file or folder"),
            ({"files": ["a/w.txt", "b/w.txt"]}, "got 'w.txt' twice"),
            ({"network": ["judge.test"]}, "network"),
            ({"network": ["judge.test:99999"]}, "ports must be from 1 to 65535, got 'judge.test:99999'"),
            ({"network": ["http://judge.test:80"]}, "network"),
            ({"net": ["judge.test:80"]}, "net"),
        ],
    )
    def test_mistakes_are_one_line(self, world: World, use: dict[str, object], words: str) -> None:
        declare(world, **use)
        result = world("plan", "run.yaml")
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
