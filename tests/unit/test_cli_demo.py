"""The demo plays a folder of files: over scripted jobs, with every step a public command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_world import BAD_REWARD, GOOD_REWARD, RUN, World, make_world

from posttrain.app.examples import OWN, find_example, load_demo
from posttrain.domain.errors import InputError
from posttrain.domain.runspec import load_run_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEMO = """\
title: Sort
seed: 3
make_data: make_data.py
datasets: {train: train.jsonl, heldout: heldout.jsonl}
model: {name: tiny, file: model.yaml}
rewards: {sort: reward.py}
channel: prod
runs:
  - {label: A, say: it ships, file: run.yaml}
  - {label: B, say: it does not, before: {reward: sort, file: reward_v2.py}, file: run.yaml, exit: 3}
  - {label: C, say: it ships again, before: {reward: sort, file: reward_v3.py}, file: run.yaml}
"""
MAKE_DATA = """\
import json, pathlib, sys
seed, out = int(sys.argv[2]), pathlib.Path(sys.argv[4])
out.mkdir()
for name, first, rows in (("train", 0, 60), ("heldout", 1000, 200)):
    lines = [json.dumps({"prompt": f"{seed} {first + i}", "completion": "x", "answer": "x"}) for i in range(rows)]
    (out / f"{name}.jsonl").write_text("\\n".join(lines))
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A folder with one example; the demo's commands run in this process, over scripted jobs."""
    made = make_world(tmp_path, monkeypatch)
    folder = tmp_path / "examples" / "01-one"
    folder.mkdir(parents=True)
    files = {"demo.yaml": DEMO, "make_data.py": MAKE_DATA, "run.yaml": RUN, "model.yaml": "layers: 1\n"}
    files |= {"reward.py": GOOD_REWARD, "reward_v2.py": BAD_REWARD, "reward_v3.py": GOOD_REWARD.replace("1.0", "0.97")}
    for name, text in files.items():
        (folder / name).write_text(text)
    real = subprocess.run

    def run(command: list[str], *, cwd: Path, env: dict[str, str], check: bool, **rest: Any) -> Any:
        if command[1] != "-m":
            return real(command, cwd=cwd, env=env, check=check, **rest)
        assert command[:3] == [sys.executable, "-m", "posttrain"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            result = made(*command[3:])
        return SimpleNamespace(returncode=result.exit_code, stdout=result.stdout)

    monkeypatch.setattr("posttrain.cli.demo.subprocess.run", run)
    return made


@pytest.mark.slow
def test_the_story_is_played_and_ends_on_the_first_model(world: World) -> None:
    shown = world.ok("demo", "--seed", "5", "--workspace", "show")
    steps = [line.removeprefix("$ posttrain ") for line in shown.splitlines() if line.startswith("$ posttrain ")]
    assert [step.split()[0] for step in steps] == [
        *("init", "asset", "asset", "asset", "asset", "plan", "run"),
        *("asset", "run", "why", "diff", "asset", "run", "rollback", "lineage", "verify"),
    ]
    assert "run ../examples/01-one/run.yaml --seed 5" in steps
    ids = dict(re.findall(r"run ([ABC])   (\S+):", shown))
    assert list(ids) == ["A", "B", "C"]
    assert f"diff {ids['A']} {ids['B']}" in steps
    for run in ids.values():
        assert (world.root / "show" / ".posttrain" / "runs" / run / "report.html").exists()
    assert (world.root / "show" / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world.root / "show")
        assert world.json("ls")["channels"][0]["run_id"] == ids["A"]


@pytest.mark.slow
def test_an_unexpected_outcome_stops_it(world: World) -> None:
    (world.root / "examples" / "01-one" / "reward_v2.py").write_text(GOOD_REWARD.replace("1.0", "0.99"))
    result = world("demo", "--workspace", "show")
    assert result.exit_code == 1
    assert "demo stopped" in result.stderr
    assert "ended with exit code 0, expected 3" in result.stderr


def test_it_is_played_below_a_workspace_of_ones_own(world: World) -> None:
    world.ok("init")
    (world.root / "examples" / "01-one" / "make_data.py").write_text("raise SystemExit(4)")
    assert world("demo", "--workspace", "show").exit_code == 4  # what comes after its workspace was made
    assert (world.root / "show" / ".posttrain").is_dir()


def test_playing_again_empties_only_its_own_folder(world: World) -> None:
    (world.root / "examples" / "01-one" / "make_data.py").write_text("raise SystemExit(4)")
    assert world("demo", "--workspace", "show").exit_code == 4
    (world.root / "show" / "left-over").touch()
    assert world("demo", "--workspace", "show").exit_code == 4
    assert not (world.root / "show" / "left-over").exists()


@pytest.mark.parametrize(
    "beside", [{}, {"demo.json": "{}"}, {".posttrain-demo": "my notes"}, {".posttrain-demo/x": ""}]
)
def test_a_folder_of_somebody_else_is_left_alone(world: World, beside: dict[str, str]) -> None:
    for name, text in {"thesis.txt": "years of work", **beside}.items():
        path = world.root / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    result = world("demo", "--workspace", "mine")
    assert result.exit_code == 2
    assert "mine must be empty or created by a demo" in result.stderr
    assert (world.root / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("title: Sort", "titel: Sort\ntitle: Sort"), "titel"),
        (("file: model.yaml", "file: modle.yaml"), "modle.yaml"),
        (("seed: 3", "seed: x"), "seed"),
    ],
)
def test_a_wrong_demo_file_is_named(world: World, change: tuple[str, str], words: str) -> None:
    path = world.root / "examples" / "01-one" / "demo.yaml"
    path.write_text(DEMO.replace(*change))
    with pytest.raises(InputError, match=words):
        load_demo(path.parent)


@pytest.mark.parametrize("folder", sorted(path.parent for path in EXAMPLES.glob("*/demo.yaml")), ids=lambda p: p.name)
def test_the_examples_of_the_repository_fit_together(folder: Path) -> None:
    plan = load_demo(folder)
    assert find_example(folder.name, EXAMPLES.parent) == folder
    for run in plan.runs:
        spec = load_run_spec(folder / run.file)
        assert spec.release is not None
        assert spec.release.channel == plan.channel
        assert spec.model == f"model:{plan.model.name}"
        assert {ref.partition(":")[2].partition("@")[0] for ref in spec.data.values()} <= plan.datasets.keys()
        assert {use.ref.partition(":")[2].partition("@")[0] for use in spec.rewards.values()} <= plan.rewards.keys()


class TestExamples:
    """`posttrain examples`: from an empty folder, where the package's own are found."""

    @pytest.fixture
    def empty(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
        return make_world(tmp_path, monkeypatch)

    def test_the_packages_own_are_listed(self, empty: World) -> None:
        listed = empty.json("examples")
        assert [one["name"] for one in listed] == ["01-sort", "02-count", "03-reward-model", "04-best-of-n"]
        told = empty.ok("examples")
        assert all(one["title"] in told for one in listed)

    def test_one_is_copied_here_and_its_steps_are_those_of_the_demo(self, empty: World) -> None:
        made = empty.json("examples", "02")
        assert (made["name"], made["folder"]) == ("02-count", "02-count")
        assert sorted(path.name for path in Path("02-count").iterdir()) == made["files"]
        assert made["steps"][0] == ["posttrain", "init"]
        assert made["steps"][-1] == ["posttrain", "run", "02-count/run.yaml"]
        for _, *words in made["steps"][1:-1]:
            assert Path(words[0]).is_file() or words[0] == "asset"
        assert "02-count/make_data.py" in empty.ok("examples", "02-count", "--to", "mine").replace("mine/", "02-count/")

    @pytest.mark.parametrize("name", ["01-sort", "02-count", "03-reward-model", "04-best-of-n"])
    def test_a_copy_stands_alone(self, empty: World, name: str) -> None:
        """Whatever it has of other examples comes along."""
        made = empty.json("examples", name)
        assert set(load_demo(Path(name)).runs[0].file.split("/")) <= set(made["files"])
        files = [word for step in made["steps"][1:] for word in step if word.startswith(f"{name}/")]
        assert len(files) > 2
        assert all(Path(file).is_file() and ".." not in file for file in files), files
        plan, out = load_demo(Path(name)), Path("made")
        words = [sys.executable, f"{name}/{plan.make_data}", "--seed", str(plan.seed), "--out", str(out)]
        subprocess.run(words, check=True, timeout=500)
        assert all((out / file).stat().st_size for file in plan.datasets.values())

    @pytest.mark.parametrize(
        ("name", "words"), [("02-count", "odd"), ("04-best-of-n", "has the same name as another file")]
    )
    def test_one_that_is_broken_or_would_mix_up_files_is_refused_and_leaves_nothing(
        self, empty: World, name: str, words: str
    ) -> None:
        shutil.copytree(OWN, "examples")
        Path("examples/04-best-of-n/reward.py").write_text("another one than the reward it names")
        with Path("examples/02-count/demo.yaml").open("a") as plan:
            plan.write("odd: 1\n")
        for _ in range(2):
            result = empty("examples", name)
            assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.stderr
            assert words in result.stderr
            assert not Path(name).exists()

    def test_what_is_there_stays(self, empty: World) -> None:
        Path("01-sort").mkdir()
        for words in (("examples", "01-sort"), ("examples", "99"), ("examples", "--to", "x"), ("examples", "0")):
            result = empty(*words)
            assert result.exit_code == 2
            assert len(result.stderr.splitlines()) == 1
        assert list(Path("01-sort").iterdir()) == []

    def test_without_a_checkout_the_demo_plays_a_copy_beside_its_workspace(
        self, empty: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        played: list[str] = []
        monkeypatch.setattr("posttrain.cli.demo._Stage._step", lambda self, shown, *_: played.append(" ".join(shown)))
        monkeypatch.setattr("posttrain.cli.demo._Stage._newest", lambda self: "sort-00000000")
        monkeypatch.setattr("posttrain.app.examples.overlaid", lambda folder, *_: folder / "curves.png")
        empty.ok("demo", "--task", "01")
        assert "posttrain plan 01-sort/run.yaml --seed 101" in played
        assert Path(".demo/01-sort/run.yaml").is_file()
