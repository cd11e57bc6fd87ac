"""CI runs every slow test in exactly one lane, and of the lanes those first that a change is about."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from ci_lanes import ci

ROOT = Path(__file__).resolve().parents[2]


def test_every_slow_test_file_is_in_one_share() -> None:
    marked = (path for path in ROOT.glob("tests/*/test_*.py") if "mark.slow" in path.read_text(encoding="utf-8"))
    shares = Counter(name for lane in ci.SLOW for name in lane.files)
    assert sorted(shares) == sorted(str(path.relative_to(ROOT)) for path in marked if path != Path(__file__))
    assert set(shares.values()) == {1}


def test_no_folder_of_tests_hides_a_package() -> None:
    """Python imports from `tests`: a folder there with a package's name counts as that package, installed."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "pyproject.toml")]
    names = {name.lower() for text in texts for name in re.findall(r"([A-Za-z][\w-]*)(?:\[[\w,]+\])?[=<>]=\d", text)}
    packages = {name.removesuffix("-cpu").replace("-", "_") for name in names}
    assert {"trl", "vllm", "ray", "verifiers"} <= packages
    assert not packages & {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}


def test_every_lane_is_a_target() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    lanes = {lane.name for lane in (*ci.CHECKS, *ci.ALWAYS, ci.PACKAGES, *ci.OTHERS)}
    assert lanes - set(targets) == {lane.name for lane in ci.SLOW}, "those are made by the rule of `slow-%`"


def test_make_test_is_what_ci_always_runs_but_for_the_demo() -> None:
    (parts,) = re.findall(r"^test: (.*?) ##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*parts.split(), "weight", "demo"} == {lane.name for lane in (*ci.CHECKS, *ci.ALWAYS)}


def test_every_room_has_a_lane() -> None:
    rooms = [path for path in (ROOT / "src" / "posttrain").iterdir() if (path / "__init__.py").exists()]
    names = [f"{room.relative_to(ROOT)}/a.py" for room in rooms]
    assert len(names) > 20
    assert [name for name in names if not any(name.startswith(lane.about) for lane in ci.SLOW)] == []


def test_lanes_of_changed_rooms_come_first_and_the_others_as_the_commit_falls() -> None:
    changed = {"src/posttrain/store/gc.py": 5, "tests/e2e/test_served.py": 40, "docs/api.md": 1}
    orders = set()
    for commit in range(20):
        order = ci.ordered(ci.OTHERS, changed, f"{commit}")
        names = [lane.name for lane, _ in order]
        assert [lines for _, lines in order[:4]] == [40, 5, 5, 1]
        assert (names[0], {*names[1:3]}) == ("slow-server", {"postgres", "slow-control"})
        assert sorted(lane.name for lane, _ in order) == sorted(lane.name for lane in ci.OTHERS)
        assert order == ci.ordered(reversed(ci.OTHERS), changed, f"{commit}")
        orders.add(tuple(names))
    assert len(orders) > 10


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three commits: of yesterday, of this morning, of now."""
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    monkeypatch.delenv("CI_BASE", raising=False)
    made = []
    for hour in (0, 20, 25):
        (tmp_path / f"{hour}.py").write_text("a\nb\n")
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "more"]):
            subprocess.run(
                ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True, timeout=60,
                env={"PATH": "/usr/bin:/bin", "GIT_COMMITTER_DATE": f"{1_700_000_000 + hour * 3600} +0000"},
            )  # fmt: skip
        made.append(ci.git("rev-parse", "HEAD"))
    return made


def test_a_clone_of_what_is_about_to_land_is_compared_with_the_day_before(history: list[str]) -> None:
    assert ci.base() == history[0]
    assert ci.changes(history[0]) == {"20.py": 2, "25.py": 2}


def test_a_branch_is_compared_with_where_it_left(history: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ci.git("update-ref", "refs/remotes/origin/HEAD", history[1])
    assert ci.base() == history[1]
    monkeypatch.setenv("CI_BASE", history[2])
    assert ci.base() == history[2]


def test_without_a_repository_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    monkeypatch.delenv("CI_BASE", raising=False)
    assert ci.base() == ""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ci.Run:
    """A run of CI with a lane that passes, one that fails, and one that passes when it is tried again."""
    (tmp_path / "Makefile").write_text(
        "good:\n\t@echo fine\n"
        "bad:\n\t@echo FAILED a; echo FAILED a; echo 'E   because'; exit 1\n"
        'flaky:\n\t@case "$$PYTEST_ADDOPTS" in *--last-failed*) ;; *) echo FAILED b; exit 1;; esac\n'
    )
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    lanes = tuple(ci.Lane(name, minutes) for name, minutes in (("good", 2), ("bad", 3), ("flaky", 5)))
    monkeypatch.setattr(ci, "OTHERS", lanes)
    for name in ("CI_STARTED", "PYTEST_ADDOPTS", "MAKELEVEL", "MAKEFLAGS", "MFLAGS"):  # of CI, which runs this
        monkeypatch.delenv(name, raising=False)
    return ci.Run(allowed=240.0)


def test_what_fails_is_tried_once_more_and_told(run: ci.Run, capfd: pytest.CaptureFixture[str]) -> None:
    good, bad, flaky = ci.OTHERS
    assert run.lane(good)
    assert run.lane(flaky)
    assert run.report()
    assert not run.lane(bad, aloud=False)
    assert not run.report()
    told = capfd.readouterr().out
    table = told[told.rindex("minutes usually") :]
    assert re.findall(r"^\w+ +0.0 +[235].0  (.*)$", table, re.MULTILINE) == [
        "passed", "passed at the second try only", "FAILED"
    ]  # fmt: skip
    assert table.endswith(
        "flaky: FAILED b\nflaky: make: *** [Makefile:6: flaky] Error 1\n"
        "bad: FAILED a\nbad: E   because\nbad: make: *** [Makefile:4: bad] Error 1\n"
    )


def test_a_lane_begins_only_where_it_ends_in_time(run: ci.Run) -> None:
    waiting = list(ci.OTHERS)
    run.others(waiting, pace=1.0)
    assert [lane.name for lane in waiting] == ["flaky"], "it takes five minutes of four"
    slower = list(ci.OTHERS)
    run.others(slower, pace=1.5)
    assert [lane.name for lane in slower] == ["bad", "flaky"]


def test_a_machine_that_is_slower_is_known_by_what_always_runs(run: ci.Run) -> None:
    good, bad, _ = ci.OTHERS
    run.took = {"good": 240.0, "bad": 360.0}
    assert run.pace([good, bad]) == 2.0
    run.took = {"good": 1.0, "bad": 1.0}
    assert run.pace([good, bad]) == 1.0


def test_what_the_demo_makes_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo.json").write_text('{"model:tiny@1": "103cbfde7505", "run 2 grpo": "99d0a1e8d37d"}')
    monkeypatch.setattr(ci, "GOLDEN_DEMO", tmp_path / "demo.json")
    output = [
        "model:tiny@1  sha256:103cbfde7505  architecture Qwen3ForCausalLM\n",
        "run a-b6n5h4c5  manifest sha256:cf39f09033e9\n",
        "run b-b6n5h4c5  manifest sha256:cf39f09033e9\n",
        "✔  grpo               grpo      succeeded         1     33.1    2.1M  sha256:99d0a1e8d37d\n",
        "✔  gate               gate      succeeded                             sha256:a6adf72ac5fa\n",
    ]
    assert ci.demo_digests(output) == {"model:tiny@1": "103cbfde7505", "run 2 grpo": "99d0a1e8d37d"}
    assert ci.other_digests(output) == []
    (told,) = ci.other_digests([line.replace("99d0", "0000") for line in output])
    assert told == "WARNING: run 2 grpo is 0000a1e8d37d, tests/golden/demo.json has 99d0a1e8d37d"
