"""What a job may import is compared with what its run began with, before any of it is imported."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from posttrain.control.jobs import closure
from posttrain.domain.errors import WorkspaceError
from posttrain.domain.jobs import JobOrder, JobState
from posttrain.domain.jobspec import JobSpec
from posttrain.execution.environment import Environment, pin, pinned, read_environment
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.jobs import entry
from posttrain.store.atomic import make_folder
from posttrain.store.attempts import AttemptFolder

PATIENCE = 300.0  # seconds for what must happen, on a machine as busy as it likes
JOB = """
import sys
from pathlib import Path
import evil_or_not
Path(sys.argv[1], "ran").write_text(evil_or_not.WORD)
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A pretended site-packages."""
    folder = tmp_path / "packages"
    (folder / "numbers_").mkdir(parents=True)
    (folder / "numbers_" / "__init__.py").write_text("VALUE = 1\n")
    (folder / "numbers_" / "fast.so").write_bytes(b"\x7fELF")
    (folder / "numbers_" / "table.csv").write_text("1,2\n")
    (folder / "job_of_mine.py").write_text(JOB)
    (folder / "evil_or_not.py").write_text("WORD = 'good'\n")
    return folder


def read(packages: Path) -> Environment:
    return read_environment([str(packages)])


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def install(packages: Path, name: str, *files: str, text: str = "") -> None:
    """A package as pip leaves it."""
    info = packages / f"{name}-1.0.dist-info"
    info.mkdir()
    for file in files:
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).write_text(text)
    (info / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in (*files, f"{info.name}/RECORD")))


class TestPackagesThatNoJobImports:
    """Those beside the ones that are named."""

    def test_audit_23_installing_changing_and_removing_them_is_no_change(self, packages: Path) -> None:
        install(packages, "Num_Bers", "numbers_/__init__.py", "numbers_/more.py")
        install(packages, "beside", "beside/__init__.py")
        begun = read_environment([str(packages)], ["num-bers"])
        assert not any("beside" in path for path in begun.files)
        assert any("evil_or_not" in path for path in begun.files), "what nobody claims is compared"
        install(packages, "later", "later/__init__.py", "later/fast.so")
        (packages / "beside" / "__init__.py").write_text("changed = 1")
        assert read_environment(begun.roots, begun.packages, begun.files) == begun
        (packages / "numbers_" / "more.py").write_text("changed = 1")
        assert "more.py changed" in read_environment(begun.roots, begun.packages, begun.files).differs(begun)

    @pytest.mark.parametrize("file", ["numbers_/__init__.py", "evil_or_not.py"])
    def test_audit_23_a_record_cannot_claim_what_the_run_began_with(self, packages: Path, file: str) -> None:
        install(packages, "numbers", "numbers_/fast.so")
        begun = read_environment([str(packages)], ["numbers"])
        install(packages, "claims", file, text="WORD = 'evil'")
        assert f"{file} changed" in read_environment(begun.roots, begun.packages, begun.files).differs(begun)

    @pytest.mark.parametrize("file", ["evil.pth", "sitecustomize.py", "usercustomize/__init__.py"])
    def test_audit_23_what_runs_at_every_start_of_python_is_compared(self, packages: Path, file: str) -> None:
        begun = read_environment([str(packages)], ["numbers"])
        install(packages, "starts", file)
        assert f"{file} is new" in read_environment(begun.roots, begun.packages, begun.files).differs(begun)

    def test_audit_23_the_listing_keeps_whose_files_it_has(self, packages: Path, tmp_path: Path) -> None:
        begun = read_environment([str(packages)], ["numbers"])
        assert begun.digest != read(packages).digest
        pin(begun, make(tmp_path / "cache"))
        assert pinned(begun.digest, tmp_path / "cache") == begun

    def test_audit_23_the_closure_follows_requirements_markers_extras_and_entry_points(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def package(name: str, requires: Sequence[str] = (), points: str = "") -> None:
            info = make(tmp_path / "site" / f"{name}-1.0.dist-info")
            lines = [f"Requires-Dist: {one}" for one in requires]
            (info / "METADATA").write_text(
                "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *lines])
            )
            (info / "entry_points.txt").write_text(points)

        package("mine", ["Needs_One>=1", "helper[fast]", 'not-here; python_version < "3"', 'opt; extra == "all"'])
        package("needs-one", ["mine"])
        package("helper", ['quick; extra == "fast"', 'slow; extra == "slow"'])
        package("quick", ["gone-away"])
        package("adds", ["needed-by-adds"], "[mine.plugins]\nit = adds:it\n")
        package("console", (), "[console_scripts]\nit = console:it\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        found = closure({"mine"}) - closure(set())
        assert found == {"mine", "needs-one", "helper", "quick", "gone-away", "adds", "needed-by-adds"}
        assert {"posttrain", "torch", "numpy"} <= closure(set())
        assert "pytest" not in closure(set())


class TestReading:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda p: (p / "evil.pth").write_text("import os\n"), "evil.pth is new"),
            (lambda p: (p / "sitecustomize.py").write_text(""), "sitecustomize.py is new"),
            (lambda p: (p / "numbers_" / "__init__.py").write_text("VALUE = 2\n"), "__init__.py changed"),
            (lambda p: (p / "numbers_" / "fast.so").write_bytes(b"\x7fELf"), "fast.so changed"),
            (lambda p: (p / "numbers_" / "fast.so").unlink(), "fast.so was deleted"),
            (lambda p: (p / "numbers_").rename(p / "others"), "is new"),
        ],
    )
    def test_a_change_is_found_and_named(self, packages: Path, change: Callable[[Path], object], words: str) -> None:
        before = read(packages)
        assert read(packages).digest == before.digest
        change(packages)
        after = read(packages)
        assert after.digest != before.digest
        assert words in after.differs(before)

    @pytest.mark.parametrize("name", ["numbers_/table.csv", "numbers_/__pycache__/x.cpython-311.py", "notes.txt"])
    def test_what_no_import_reads_is_no_change(self, packages: Path, name: str) -> None:
        before = read(packages)
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text("other")
        assert read(packages).digest == before.digest

    def test_the_same_size_and_times_do_not_hide_it(self, packages: Path) -> None:
        path = packages / "numbers_" / "__init__.py"
        before, times = read(packages), path.stat()
        path.write_text("VALUE = 9\n")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert path.stat().st_size == times.st_size
        assert read(packages).differs(before) == f"{path} changed"

    def test_what_is_remembered_is_not_read_again(self, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = read(packages)
        monkeypatch.setattr("posttrain.execution.environment._digest", lambda path: pytest.fail(f"read {path} again"))
        assert read(packages) == before

    def test_links_are_followed_once(self, packages: Path) -> None:
        (packages / "again").symlink_to(packages, target_is_directory=True)
        (packages / "broken.py").symlink_to(packages / "nothing.py")
        before = read(packages)
        (packages / "aside.py").symlink_to(packages / "numbers_" / "__init__.py")
        assert "aside.py is new" in read(packages).differs(before)

    def test_a_forged_listing_is_none(self, packages: Path, tmp_path: Path) -> None:
        environment = read(packages)
        pin(environment, tmp_path)
        assert pinned(environment.digest, tmp_path) == environment
        [listing] = (tmp_path / "environments").iterdir()
        listing.write_text(listing.read_text().replace("evil_or_not", "evil_or_yes"))
        assert pinned(environment.digest, tmp_path) is None

    @pytest.mark.slow
    def test_of_this_interpreter(self) -> None:
        found = read_environment()
        assert any(path.endswith("/json/__init__.py") for path in found.files)
        assert any(path.endswith("/pydantic/__init__.py") for path in found.files)
        assert any(path.endswith("/posttrain/domain/errors.py") for path in found.files)


class TestJob:
    def finish(self, folder: Path, packages: Path, digest: str, cache: Path) -> LocalExecutor:
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({"environment": digest, "cache_dir": str(cache)}))
        executor = LocalExecutor()
        spec = JobSpec(f"job-{time.monotonic_ns()}", folder.as_uri(), "job_of_mine", {"PYTHONPATH": str(packages)})
        executor.submit(spec)
        until = time.monotonic() + PATIENCE
        while executor.observe([spec])[0].state is not JobState.EXITED and time.monotonic() < until:
            time.sleep(0.02)
        assert executor.observe([spec])[0].exit_code == 0, (folder / "log.txt").read_text()
        return executor

    def test_the_same_environment_runs(self, packages: Path, tmp_path: Path) -> None:
        environment = read(packages)
        pin(environment, tmp_path)
        self.finish(tmp_path / "job", packages, environment.digest, tmp_path)
        assert (tmp_path / "job" / "ran").read_text() == "good"

    def test_another_one_is_refused_before_anything_of_it_runs(self, packages: Path, tmp_path: Path) -> None:
        environment = read(packages)
        pin(environment, tmp_path)
        (packages / "evil_or_not.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\nWORD = 'evil'\n")
        self.finish(tmp_path / "job", packages, environment.digest, tmp_path)
        result = json.loads((tmp_path / "job" / "result.json").read_bytes())
        assert result["status"] == "failed"
        assert result["failure"]["kind"] == "bad_input"
        assert "evil_or_not.py changed; restore it, or accept the current environment" in result["failure"]["message"]
        assert not (tmp_path / "pwned").exists()
        assert not (tmp_path / "job" / "ran").exists()

    def test_a_lost_listing_is_told(self, packages: Path, tmp_path: Path) -> None:
        self.finish(tmp_path / "job", packages, "sha256:" + "0" * 64, tmp_path)
        result = json.loads((tmp_path / "job" / "result.json").read_bytes())
        assert "no longer exists; posttrain retry" in result["failure"]["message"]

    def test_variables_and_compiled_files_that_steer_python_do_not_reach_it(
        self, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONSTARTUP", "x")
        monkeypatch.setenv("PYTHONINSPECT", "")
        (packages / "evil_or_not.py").write_text(
            "import os, sys\n"
            "WORD = ','.join(sorted(n for n in os.environ if n.startswith('PYTHON'))) + ' ' + str(sys.pycache_prefix)\n"
        )
        self.finish(tmp_path / "job", packages, "", tmp_path)
        assert (tmp_path / "job" / "ran").read_text() == f"PYTHONPATH {tmp_path / 'home' / 'posttrain' / 'compiled'}"

    def test_what_it_starts_itself_finds_site_packages(self, packages: Path, tmp_path: Path) -> None:
        """Ray hands `-S` down to its workers, which then have none; neither home nor folder are on the path."""
        (packages / "evil_or_not.py").write_text(
            "import sys\nWORD = f'{sys.flags.no_site} {sys.flags.no_user_site} {int(sys.flags.safe_path)}'\n"
        )
        self.finish(tmp_path / "job", packages, "", tmp_path)
        assert (tmp_path / "job" / "ran").read_text() == "0 1 1"


def test_a_package_that_the_run_did_not_attest_runs_nothing(tmp_path: Path) -> None:
    """A launcher finds posttrain by PYTHONPATH, its jobs do not: what runs would not be what the manifest names."""
    environment = Environment(("/elsewhere/posttrain",), {})
    pin(environment, tmp_path)
    attempt = AttemptFolder(tmp_path / "001")
    order = JobOrder("n", "sft", 1, {}, {}, f"file://{tmp_path}/blobs", str(tmp_path), environment=environment.digest)
    attempt.path.mkdir()
    (attempt.path / "job.json").write_text(json.dumps(order.to_json()))
    assert entry.run(str(attempt.path), lambda job: pytest.fail("it runs")) == 0
    result = attempt.read_result()
    assert result is not None
    assert result.failure is not None
    assert "which its run did not attest, because PYTHONPATH does not reach jobs" in result.failure.message


class TestOddPlaces:
    @pytest.mark.parametrize("name", ["sitecustomize.pyc", "python311.zip", "pyvenv.cfg", "numbers_/test/__init__.py"])
    def test_other_ways_in(self, packages: Path, name: str) -> None:
        before = read(packages)
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_bytes(b"x")
        assert f"{name.rpartition('/')[2]} is new" in read(packages).differs(before)

    def test_what_is_no_file_is_no_end(self, packages: Path) -> None:
        os.mkfifo(packages / "pipe.py")
        (packages / "loop.py").symlink_to(packages / "loop.py")
        (packages / "loops").symlink_to(packages / "loops")
        assert read(packages).digest == read(packages).digest

    def test_a_damaged_memory_is_no_memory(self, packages: Path, tmp_path: Path) -> None:
        before = read(packages)
        [memory] = (tmp_path / "home" / "posttrain").glob("digests-*.json")
        memory.write_text(json.dumps(dict.fromkeys(json.loads(memory.read_text()), 7)))
        assert read(packages) == before


@pytest.mark.slow
def test_nothing_is_made_where_a_workspace_was(tmp_path: Path) -> None:
    """Between reading an environment and keeping it there are seconds, in which a workspace may be moved."""
    gone = tmp_path / "gone"
    with pytest.raises(WorkspaceError):
        pin(read_environment(), gone)
    with pytest.raises(WorkspaceError):
        make_folder(gone / "runs" / "one", within=gone)
    assert not gone.exists()
