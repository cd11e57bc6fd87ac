"""What installed packages add: found when it is asked for, refused in one line, and no hindrance to anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import RUN, make_world
from installed import install, on_path

from posttrain.app.doctor import _packages
from posttrain.domain import plugins
from posttrain.domain.errors import InputError
from posttrain.domain.plugins import TRAINERS, find_plugin
from posttrain.execution.installed import InstalledTrainer, Trainers
from posttrain.execution.ports import Trainer
from posttrain.execution.trainers.fake import FakeTrainer

POINTS = "[posttrain.trainers]\ncoach = {module}:Coach\n"
COACH = """
    from posttrain.execution.trainers.fake import FakeTrainer

    class Coach(FakeTrainer):
        name = "coach"
"""


@pytest.fixture(autouse=True)
def _look_anew() -> Iterator[None]:
    yield
    plugins._scan.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    on_path(monkeypatch, tmp_path / "site")
    return tmp_path / "site"


def coach(site: Path, module: str, version: str = "1.0", source: str = COACH, **more: Any) -> None:
    name = f"posttrain-{module.partition('_')[0]}"
    install(site, name, version, POINTS.format(module=module), {f"{module}.py": source}, **more)


def trainers() -> Trainers:
    return Trainers([FakeTrainer()])


def test_a_trainer_of_an_installed_package_is_a_trainer(site: Path) -> None:
    coach(site, "gym_whole")
    known = trainers()
    assert list(known) == ["fake", "coach"]
    made: Trainer = known["coach"]
    assert isinstance(made, InstalledTrainer)
    assert (made.name, made.plugin.distribution) == ("coach", "posttrain-gym 1.0")
    assert made.check("sft", {"model": "base"}).outputs == {"model": "tree"}
    assert known["coach"] is made


def test_a_name_that_posttrain_has_itself_looks_at_no_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_scan", lambda: pytest.fail("looked at the packages"))
    assert trainers()["fake"].name == "fake"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise OSError('no\\nlicence')", "raised OSError: no licence; fix or uninstall it"),
        ("import nothing_of_that_name", "raised ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("coach = 1", "raised AttributeError: module '{}' has no attribute 'Coach'"),
        ("Coach = 3", "must name a class or a function that creates a trainer, got 3"),
        ("class Coach: name = 'coach'", "this one lacks code_digest, check, devices, compile, collect"),
        (COACH.replace('"coach"', '"other"'), "its trainer must be named like the entry point, got 'other'"),
    ],
    ids=["raises", "imports", "exits", "lacks-it", "no-class", "no-trainer", "other-name"],
)
def test_a_broken_package_is_one_line_that_names_it(
    site: Path, source: str, says: str, request: pytest.FixtureRequest
) -> None:
    module = f"gym_broken_{request.node.callspec.id.replace('-', '_')}"
    coach(site, module, source=source)
    known = trainers()
    with pytest.raises(InputError) as caught:
        known["coach"]
    told = str(caught.value)
    assert told.startswith("trainer 'coach' of posttrain-gym 1.0: ")
    assert "\n" not in told
    assert says.format(module) in told
    assert known["fake"].name == "fake"


def test_what_its_code_raises_later_is_one_line_too(site: Path) -> None:
    coach(
        site, "gym_later", source=COACH + "\n        def check(self, kind, params):\n            return params['no']\n"
    )
    with pytest.raises(InputError, match=r"^trainer 'coach' of posttrain-gym 1.0: check of kind 'sft' raised KeyError"):
        trainers()["coach"].check("sft", {})


def test_one_name_of_two_packages_is_refused_and_the_others_go_on(site: Path) -> None:
    coach(site, "gym_one")
    coach(site, "club_one", "2.0")
    says = "trainer 'coach' of posttrain-{}: must be in one installed package, got posttrain-club 2.0 and posttrain-gym"
    with pytest.raises(InputError) as caught:
        trainers()["coach"]
    assert str(caught.value).startswith((says.format("gym 1.0"), says.format("club 2.0")))
    assert trainers()["fake"].name == "fake"


def test_the_same_package_twice_on_the_path_is_one(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(monkeypatch, tmp_path / "nearer")
    coach(site, "gym_twice")
    coach(tmp_path / "nearer", "gym_twice", "1.1")
    found = find_plugin(TRAINERS, "coach")
    assert found is not None
    assert found.distribution == "posttrain-gym 1.1"


def test_a_listing_that_cannot_be_read_hinders_nothing_but_what_may_be_in_it(site: Path) -> None:
    install(site, "posttrain-torn", "1.0", "[posttrain.trainers]\nno equals sign\n", {})
    assert trainers()["fake"].name == "fake"
    with pytest.raises(InputError, match=r"'coach' may be in an installed package that cannot be read: posttrain-torn"):
        trainers()["coach"]
    coach(site, "gym_beside")
    plugins._scan.cache_clear()
    assert trainers()["coach"].name == "coach"


def test_its_sources_version_and_requirements_are_its_code(site: Path) -> None:
    def digest() -> str:
        plugins._scan.cache_clear()
        return trainers()["coach"].code_digest()

    source = {"gym_code/__init__.py": "", "gym_code/parts/__init__.py": COACH, "gym_code/words.txt": "one\n"}
    points = "[posttrain.trainers]\ncoach = gym_code.parts:Coach\n"
    install(site, "posttrain-gym", "1.0", points, source, ("pytest>=8",))
    first = digest()
    assert digest() == first
    (site / "gym_code" / "words.txt").write_text("two\n")
    second = digest()
    (site / "gym_code" / "__pycache__").mkdir(exist_ok=True)
    (site / "gym_code" / "__pycache__" / "left.pyc").write_bytes(b"compiled")
    assert digest() == second != first, "compiled files decide nothing"
    install(site, "posttrain-gym", "1.0", points, {}, ("pytest>=8", "absent-package"))
    third = digest()
    (site / "posttrain_gym-1.0.dist-info").rename(site / "posttrain_gym-1.1.dist-info")
    install(site, "posttrain-gym", "1.1", points, {}, ("pytest>=8", "absent-package"))
    assert len({first, second, third, digest()}) == 4


def test_a_part_of_a_namespace_is_digested_alone(site: Path) -> None:
    points = "[posttrain.trainers]\ncoach = gym_space.inner.parts:Coach\n"
    source = {"gym_space/inner/__init__.py": "", "gym_space/inner/parts.py": COACH, "gym_space/other/x.py": "1"}
    install(site, "posttrain-gym", "1.0", points, source)
    before = trainers()["coach"].code_digest()
    (site / "gym_space" / "other" / "x.py").write_text("2")
    assert trainers()["coach"].code_digest() == before
    (site / "gym_space" / "inner" / "more.py").write_text("3")
    assert trainers()["coach"].code_digest() != before


def test_doctor_names_what_is_installed_and_what_is_wrong_with_it(site: Path) -> None:
    assert _packages().state == "ok"
    coach(site, "gym_told", source="raise OSError('nobody imports it')")
    plugins._scan.cache_clear()
    assert (_packages().state, _packages().finding) == ("ok", "trainer 'coach' of posttrain-gym 1.0")
    coach(site, "club_told")
    install(
        site, "posttrain-odd", "1", "[posttrain.trainers]\nnative = m:a\nCamel = m:a\n[posttrain.moods]\nx = m:a\n", {}
    )
    plugins._scan.cache_clear()
    found = _packages()
    assert found.state == "warn"
    for part in (
        "must be in one installed package, got posttrain-club 1.0 and posttrain-gym 1.0",
        "trainer 'native' of posttrain-odd 1: Posttrain itself has this name",
        "trainer 'Camel' of posttrain-odd 1: a name must consist of lower-case letters",
        "mood 'x' of posttrain-odd 1: there is no group posttrain.moods",
    ):
        assert part in found.finding


def test_a_run_file_may_name_it(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that names another is told of it."""
    coach(site, "gym_plan")
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    world.write("run.yaml", RUN.replace("kind: sft,", "kind: sft, trainer: couch,"))
    result = world("plan", "run.yaml")
    assert result.exit_code == 2
    assert "stages.sft.trainer: unknown trainer 'couch' (did you mean 'coach'?)" in result.stderr
    world.write("run.yaml", RUN.replace("kind: sft,", "kind: sft, trainer: coach,"))
    assert world.json("plan", "run.yaml")["manifest"]["code"].keys() == {"native", "coach"}
    world.ok("run", "run.yaml")


def test_help_and_a_plain_command_read_no_package_list(tmp_path: Path) -> None:
    """Neither imports what reads it, nor calls it."""
    commands = [["--help"], ["init"], ["ls"]]
    program = (
        "import sys\n"
        "from posttrain.cli.main import main\n"
        f"for command in {commands}:\n"
        "    sys.argv[1:] = command\n"
        "    try:\n        main()\n    except SystemExit as end:\n        code = end.code\n"
        "    found = sys.modules.get('posttrain.domain.plugins')\n"
        "    print('LOOKED', bool(found and found._scan.cache_info().currsize), code, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("LOOKED")]
    assert told == ["LOOKED False 0"] * len(commands), (done.stdout, done.stderr)
