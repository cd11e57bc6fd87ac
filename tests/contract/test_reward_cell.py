"""Nothing that a reward starts outlives it, what it may use is bounded, and what it is given is there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_bench import PATIENCE, Opener, call

from posttrain.domain.errors import InfrastructureError
from posttrain.sandbox import cell
from posttrain.sandbox.barriers import OVER_MEMORY, Group, below
from posttrain.sandbox.port import RewardError
from posttrain.sandbox.process import ProcessReward, open_reward
from posttrain.sandbox.session import Provision

DETACHES = """
import os, subprocess, time

def score(completion):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
            os._exit(0)
        os.wait()
    print("started", flush=True)
    while {hang}:
        time.sleep(600)
    return 1.0
"""
# A job in a process of its own. Arguments: source, how it ends, the mark, where this file lies.
USES = """
import json, sys
from pathlib import Path
source, ending, mark, here = sys.argv[1:]
sys.path.insert(0, here)
from test_reward_cell import call, living
from posttrain.sandbox.port import RewardError
from posttrain.sandbox.process import open_reward
reward = open_reward(Path(source), timeout=2 if ending == "time-out" else 300)
started = 0
try:
    reward.score(call("12"))
    started = len(living(mark))
except RewardError as error:
    started = "time-out" in str(error)
reward.close()
print(json.dumps({"whole": reward.confined, "started": started, "left": living(mark)}))
"""
# Goes on, in its own PID namespace, until one of its processes has the number that the answer says; that one's children
# have the next numbers. The score is the last of them.
COUNTS = """
import os, time

def score(completion, answer):
    reading, writing = os.pipe()
    while (child := os.fork()) and child < int(answer):
        os.waitpid(child, 0)
    if not child:
        if os.getpid() < int(answer):
            os._exit(0)
        for _ in range(40):
            last = os.fork()
            if not last:
                time.sleep(600)
        os.write(writing, str(last).encode())
        time.sleep(600)
    return float(os.read(reading, 20))
"""
# A job among few processes, so that numbers are small. Arguments: source, where this file lies.
AMONG_OTHERS = """
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_reward_cell import call
from posttrain.sandbox.process import open_reward

def parent(process):
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])

for _ in range(5):
    subprocess.run(["true"])  # takes the first numbers, which the reward itself has in its namespace
reward = open_reward(Path(sys.argv[1]), timeout=300)
[keeper] = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if parent(entry) == os.getpid()]
others = [subprocess.Popen(["sleep", "600"]) for _ in range(20)]
last = reward.score(call("x", answer=str(keeper)))[0].score
same = [other.pid for other in others if keeper < other.pid <= last]
reward.close()
print(json.dumps({"same": same, "died": [other.pid for other in others if other.poll() is not None]}))
"""
# A job that has a reward open until it is killed. Argument: source.
OPENS = """
import sys, time
from pathlib import Path
from posttrain.sandbox.process import open_reward
reward = open_reward(Path(sys.argv[1]), timeout=60)
print("open", flush=True)
time.sleep(600)
"""
FORBIDDEN = 77  # exit code of FORBID where it cannot take namespaces away
FORBID = """
for kind in user pid net mnt; do echo 0 > /proc/sys/user/max_${kind}_namespaces || exit 77; done
exec "$@"
"""


@pytest.mark.parametrize("cell", ["namespaces", "none"])
@pytest.mark.parametrize("ending", ["close", "time-out", "job killed"])
def test_nothing_outlives_it(write: Callable[[str], Path], cell: str, ending: str) -> None:
    mark = f"600.{uuid.uuid4().int % 10**12:012d}"  # seconds of sleep, by which the detached processes are found
    source = write(DETACHES.format(mark=mark, hang=ending != "close"))
    program = [sys.executable, "-c", USES, str(source), ending, mark, str(Path(__file__).parent)]
    if cell == "none":
        program = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh", *program]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        if ending == "job killed":
            assert eventually(lambda: len(living(mark)) >= 3 or job.poll() is not None)
            assert len(living(mark)) >= 3 or job.poll() == FORBIDDEN
            job.kill()
        out, err = job.communicate(timeout=PATIENCE)
    if job.returncode == FORBIDDEN or (cell == "none" and not shutil.which("unshare")):
        pytest.skip("this machine makes no user namespaces, so the kernel that gives none cannot be played")
    if ending == "job killed":
        assert eventually(lambda: not living(mark))
        return
    assert job.returncode == 0, err
    report = json.loads(out)
    assert report["started"] or "started" in err, "the reward's detached processes were there to be killed"
    assert "started" in err
    assert report["left"] == []
    assert report["whole"] == (cell != "none")


def test_processes_of_the_same_numbers_outside_live_on(write: Callable[[str], Path]) -> None:
    fresh = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*fresh, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no PID namespace for the test, where the numbers of processes are small")
    program = [sys.executable, "-c", AMONG_OTHERS, str(write(COUNTS)), str(Path(__file__).parent)]
    done = subprocess.run([*fresh, *program], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["same"], "processes inside had numbers of processes outside"
    assert report["died"] == []


PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ\n-----END PRIVATE KEY-----"


class TestBounds:
    def test_hang_while_imported(self, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("posttrain.sandbox.process.LOAD_TIMEOUT", 1.0)
        with pytest.raises(RewardError, match="timeout of 1 s to load"):
            opened("import time\ntime.sleep(600)\n", timeout=0.5)

    def test_memory_of_all_processes_together(self, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("posttrain.sandbox.session.MEMORY", 300 * 2**20)
        source = """
            import os, time
            def score(completion):
                for _ in range(4):
                    if os.fork() == 0:
                        held = bytearray(os.urandom(2**20)) * 120
                        time.sleep(600)
                time.sleep(600)
        """
        with pytest.raises(RewardError, match=r"used more than .* GiB of memory.* and was killed"):
            opened(source, timeout=PATIENCE).score(call("12"))

    def test_number_of_processes(self, opened: Opener) -> None:
        source = """
            import os, time
            def score(completion):
                while True:
                    try:
                        if os.fork() == 0:
                            time.sleep(600)
                    except OSError:
                        time.sleep(0.01)
        """
        with pytest.raises(RewardError, match=r"used more than 256 processes and threads and was killed"):
            opened(source, timeout=PATIENCE).score(call("12"))

    def test_threads_count(self, opened: Opener) -> None:
        source = """
            import threading, time
            def score(completion):
                made = 0
                for _ in range(400):
                    try:
                        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
                    except RuntimeError:
                        return made
                    made += 1
                time.sleep(600)
        """
        found = "processes and threads"
        with contextlib.suppress(RewardError) as _, opened(source) as reward:
            found = str(reward.score(call("12"))[0].score)
        assert found == "processes and threads" or float(found) < 400

    def test_what_one_process_may_take(self, opened: Opener) -> None:
        big = "import os\ndef score(completion):\n    open(os.environ['HOME'] + '/big', 'wb').truncate(1 << 31)\n"
        with pytest.raises(RewardError, match=r"OSError|signal 25"):
            opened(big).score(call("12"))
        with pytest.raises(RewardError, match="MemoryError"):
            opened("def score(completion):\n    return len(bytearray(1 << 40))\n").score(call("12"))

    def test_output_is_kept_up_to_a_limit(self, opened: Opener, capfd: pytest.CaptureFixture[str]) -> None:
        source = "def score(completion):\n    for _ in range(300):\n        print('x' * 9999)\n    return 1\n"
        reward = opened(source)
        assert reward.score(call("12"))[0].score == 1.0
        reward.close()
        seen = capfd.readouterr().err
        assert seen.count("x") <= 2**20
        assert "more bytes of the reward's output were dropped" in seen

    def test_prints_do_not_disturb_the_answers(self, opened: Opener, capfd: pytest.CaptureFixture[str]) -> None:
        reward = opened("def score(completion):\n    print('seen', completion)\n    return 1\n")
        assert reward.score(call("12"))[0].score == 1.0
        reward.close()
        assert "seen 12" in capfd.readouterr().err

    def test_a_worker_killed_at_once_loses_no_printed_line(
        self, opened: Opener, capfd: pytest.CaptureFixture[str]
    ) -> None:
        source = "import os\ndef score(completion):\n    print('seen', completion)\n    os.kill(os.getpid(), 9)\n"
        reward = opened(source)
        with pytest.raises(RewardError):
            reward.score(call("12"))
        reward.close()
        assert "seen 12" in capfd.readouterr().err

    def test_its_scratch_goes(self, opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
        (tmp_path / "scratch").mkdir()
        reward = opened("def score(completion):\n    return 1\n")
        assert len(list((tmp_path / "scratch").iterdir())) == 1
        reward.close()
        assert list((tmp_path / "scratch").iterdir()) == []


class TestKilled:
    """What kills a reward from outside is no fault of the reward's."""

    COUNTS_CALLS = """
        def score(completion, rows=None):
            return {"score": float(len(completion)), "pid": 0}
    """

    @pytest.mark.slow
    def test_it_is_started_again(self, opened: Opener) -> None:
        reward = opened(self.COUNTS_CALLS)
        for _ in range(5):
            [worker] = [pid for pid in descendants() if b"sandbox.worker" in command(pid)][-1:]
            os.kill(worker, signal.SIGKILL)
            assert [s.score for s in reward.score(call("12", "123"))] == [2.0, 3.0]

    @pytest.mark.slow
    def test_in_the_middle_of_a_call(self, opened: Opener, capfd: pytest.CaptureFixture[str]) -> None:
        source = """
            import os, random, signal
            def score(completion):
                if completion == "kill" and not os.path.exists("/reward/none"):
                    print("again", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                return random.random()
        """
        quiet = opened(source).score(call("a", "b"))
        scores = opened(source).score(call("a", "kill", "b"), allowed=1)
        assert [s.status for s in scores] == ["ok", "error", "ok"], (
            "again and again at the same completion is its own doing"
        )
        assert "signal 9" in scores[1].message
        with pytest.raises(InfrastructureError, match=r"signal 9\) instead of answering, 4 times in a row"):
            opened(
                source.replace("score(completion)", "score(completions, **kw)").replace(
                    'completion == "kill" and not os.path.exists("/reward/none")', "True"
                )
            ).score(call("a", "b"))
        assert opened(source).score(call("a", "b")) == quiet

    def test_a_crash_of_its_own_is_its_own_fault(self, opened: Opener) -> None:
        source = """
            import ctypes
            def score(completion):
                if completion == "crash":
                    ctypes.string_at(0)
                return 1
        """
        scores = opened(source).score(call("a", "crash", "b"), allowed=1)
        assert [s.status for s in scores] == ["ok", "error", "ok"]
        assert "signal 11" in scores[1].message

    def test_exit_is_named(self, opened: Opener) -> None:
        with pytest.raises(RewardError, match=r"ended its process \(exit code 7\)"):
            opened("import os\ndef score(completion):\n    os._exit(7)\n").score(call("12"))
        with pytest.raises(RewardError, match="SystemExit: 3"):
            opened("import sys\ndef score(completion):\n    sys.exit(3)\n").score(call("12"))


class TestLeft:
    def test_the_cell_of_a_job_that_died_is_swept(self, write: Callable[[str], Path], tmp_path: Path) -> None:
        source = write("def score(completion):\n    return 1\n")
        (tmp_path / "scratch").mkdir()
        environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
        program = [sys.executable, "-c", OPENS, str(source)]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as job:
            assert job.stdout is not None
            assert job.stdout.readline() == "open\n"
            assert list((tmp_path / "scratch").iterdir())
            os.kill(job.pid, signal.SIGKILL)
        assert eventually(lambda: not list((tmp_path / "scratch").iterdir()))

    @pytest.mark.parametrize(
        ("job", "flags", "left"), [("lives", 0x400000, True), ("ends", 0x400104, False), ("gone", 0, False)]
    )
    def test_its_folder_goes_when_its_job_ends_and_not_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, flags: int, left: bool
    ) -> None:
        """A worker that is started again finds its scratch; a job's pipes close before its children are orphans."""
        folder = tmp_path / "scratch"
        folder.mkdir()
        stat = cell._stat(Path("/proc", str(os.getppid())))
        monkeypatch.setattr(cell, "_stat", lambda process: [*stat[:6], str(flags), *stat[7:]])
        cell._sweep(os.getpid() if job == "gone" else os.getppid(), folder)
        assert folder.exists() == left

    def test_the_cell_of_a_job_that_died_before_it_had_a_keeper_is_swept_by_the_next(
        self, write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = write("def score(completion):\n    return 1\n")
        (tmp_path / "scratch").mkdir()
        dies = "import os, posttrain.sandbox.process as p; p.Session = lambda *_: os.kill(os.getpid(), 9)\n" + OPENS
        environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
        ended = subprocess.run([sys.executable, "-c", dies, str(source)], env=environment, check=False)
        assert ended.returncode == -signal.SIGKILL
        [left] = (tmp_path / "scratch").iterdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
        with open_reward(source, timeout=PATIENCE) as first, open_reward(source, timeout=PATIENCE) as second:
            assert not left.exists()
            assert len(list((tmp_path / "scratch").iterdir())) == 2, "what somebody holds stays"
            assert first.score(call("12"))[0].score == second.score(call("12"))[0].score == 1.0
        assert not list((tmp_path / "scratch").iterdir())

    def test_closing_while_it_is_started_again(self, opened: Opener) -> None:
        reward = opened("import time\ndef score(completion):\n    time.sleep(600)\n")
        asked = threading.Thread(target=_ask, args=(reward,), daemon=True)
        asked.start()
        assert eventually(lambda: len(descendants()) >= 3)
        reward.close()
        asked.join(PATIENCE)
        assert not asked.is_alive()
        assert eventually(lambda: not [pid for pid in descendants() if b"sandbox.worker" in command(pid)])


def _ask(reward: ProcessReward) -> None:
    with contextlib.suppress(Exception):
        reward.score(call("12"))


class TestGiven:
    """What a run declares is there, and nothing else."""

    def test_files(self, write: Callable[[str], Path], tmp_path: Path) -> None:
        (tmp_path / "elsewhere" / "lists").mkdir(parents=True)
        (tmp_path / "elsewhere" / "lists" / "b.txt").write_text("2")
        (tmp_path / "elsewhere" / "words.txt").write_text("1")
        source = """
            from pathlib import Path
            here = Path(__file__).parent
            def score(completion):
                return float(int((here / "words.txt").read_text()) + int((here / "data/b.txt").read_text()))
        """
        files = {"words.txt": tmp_path / "elsewhere" / "words.txt", "data": tmp_path / "elsewhere" / "lists"}
        with open_reward(write(source), timeout=PATIENCE, provision=Provision(files)) as reward:
            assert reward.score(call("12"))[0].score == 3.0

    def test_a_declared_host_and_no_other(self, write: Callable[[str], Path]) -> None:
        source = """
            import socket
            def ask(host, port):
                with socket.create_connection((host, port)) as made:
                    made.sendall(b"hello")
                    made.shutdown(socket.SHUT_WR)
                    return made.recv(99).decode()
            def score(completion, port, other):
                try:
                    ask("localhost", other)
                    return -1.0
                except OSError:
                    return float(ask("judge.test", port) == "hello!")
        """
        with echo_server() as port, echo_server() as other:
            given = Provision({}, (f"judge.test:{port}",))
            with resolving("judge.test"), open_reward(write(source), timeout=PATIENCE, provision=given) as reward:
                scores = reward.score(call("12", "13", port=port, other=other))
        assert [score.score for score in scores] == [1.0, 1.0]

    def test_audit_29_the_loopback_address_is_declared_as_a_name_is(self, write: Callable[[str], Path]) -> None:
        source = """
            import socket
            def score(completion, port, other):
                try:
                    socket.create_connection(("127.0.0.1", other)).close()
                    return -1.0
                except OSError:
                    with socket.create_connection(("127.0.0.1", port)) as made:
                        made.sendall(b"hello")
                        return float(made.recv(99) == b"hello!")
        """
        with echo_server() as port, echo_server() as other:
            given = Provision({}, (f"127.0.0.1:{port}",))
            with open_reward(write(source), timeout=PATIENCE, provision=given) as reward:
                assert reward.score(call("12", port=port, other=other))[0].score == 1.0

    def test_audit_29_a_secret_reaches_its_cell_and_nothing_that_it_says(
        self, write: Callable[[str], Path], opened: Opener, capfd: pytest.CaptureFixture[str]
    ) -> None:
        key = 'sk-"quoted\\and-long'
        source = """
            import os, sys, time
            def score(completion):
                key = os.environ["JUDGE_KEY"]
                print("whole", key)
                for part in (key[:5], key[5:], " in parts"):
                    sys.stdout.write(part)
                    sys.stdout.flush()
                    time.sleep(0.05)
                if completion == "fails":
                    raise ValueError(f"401 for {key}")
                return {"score": float(len(key)), f"component {key}": 1.0}
        """
        given = Provision({}, secrets={"JUDGE_KEY": key})
        with open_reward(write(source), timeout=PATIENCE, provision=given) as reward:
            good, bad = reward.score(call("passes", "fails"), allowed=1)
            known = [Path(f"/proc/{pid}/cmdline") for pid in below(os.getpid())]
            lines = [path.read_text() for path in known if path.exists()]
        assert good.score == len(key)
        assert list(good.components) == ["component [JUDGE_KEY]"]
        assert "401 for [JUDGE_KEY]" in bad.message
        printed = capfd.readouterr()
        assert "whole [JUDGE_KEY]\n[JUDGE_KEY] in parts" in printed.err
        assert lines
        for text in (printed.err, printed.out, str(bad), repr(given), *lines):
            assert key not in text
            assert key[:9] not in text
        other = opened("import os\ndef score(completion):\n    return float('JUDGE_KEY' in os.environ)\n")
        assert other.score(call("x"))[0].score == 0.0

    @pytest.mark.parametrize(
        ("key", "code"),
        [
            ("eyJhbGciOi" + "A1b2C3d4E5" * 60, "raise ValueError(f'Client error 401 for Bearer {key}')"),
            ("sk-live-0123456789abcdef", "raise ValueError('x' * 270 + f' https://judge/?key={key}')"),
            (PEM, "raise ValueError(f'bad key {key}')"),
            (PEM, "raise KeyError(key)"),
            (PEM, "raise ValueError(json.dumps({'sent': [repr({'key': key})]}))"),
            (PEM, "raise ExceptionGroup('both', [ValueError(key), KeyError(key)])"),
            ("pa\\ss-word'123\"456", "raise KeyError(key)"),
            ("pa\\ss-word'123\"456", "raise KeyError({'key': [key], 'quote': \"'\"})"),
            ("A1b2C3d4E5" * 61, "return {'score': 1.0, 'x' * 20 + key: 1.0}"),
            ("A1b2C3d4E5" * 61, "return {'y': 1.0, 'x' * 600 + key: 1.0}"),
            ("A1b2C3d4E5" * 61, "return {'token_scores': {'x' * 20 + key: 1.0}}"),
        ],
    )
    def test_audit_29_no_part_of_a_secret_is_left_where_a_text_is_cut_collapsed_or_escaped(
        self, write: Callable[[str], Path], capfd: pytest.CaptureFixture[str], key: str, code: str
    ) -> None:
        source = f"""
            import json, os
            def score(completion):
                key = os.environ['JUDGE_KEY']
                if completion:
                    {code}
                return 1.0
        """
        with open_reward(
            write(source), timeout=PATIENCE, provision=Provision({}, secrets={"JUDGE_KEY": key})
        ) as reward:
            answer, _ = reward.score(call("x", ""), allowed=1)
        printed = capfd.readouterr().err
        assert "[JUDGE_KEY]" in str(answer) + printed
        for part in ("A1b2C3d4E5", "hbGciOi", "sk-live", "0123456789", "MIIEvQI", "kqhkiG9", "ss-word", "456"):
            assert part not in str(answer)
            assert part not in printed

    def test_random_numbers_are_those_of_the_call(self, opened: Opener) -> None:
        source = "import random\ndef score(completion):\n    return random.random()\n"
        late = opened("def score(completion):\n    import numpy\n    return float(numpy.random.random())\n")
        assert late.score(call("a", "b")) == late.score(call("a", "b")), "numpy's too, imported in the middle"
        first, second = opened(source), opened(source)
        first.score(call("warm", "up"))
        assert first.score(call("a", "b")) == second.score(call("a", "b"))
        assert first.score(call("a", "b")) != first.score(call("a", "c"))

    def test_hidden_folders_are_empty_even_where_its_own_source_lies(self, tmp_path: Path) -> None:
        workspace = tmp_path / "workspace"
        (workspace / "cache").mkdir(parents=True)
        (workspace / "ledger.db").write_text("the answers")
        (workspace / "cache" / "parts.py").write_text("VALUE = 0.5\n")
        (workspace / "cache" / "reward.py").write_text(
            "from parts import VALUE\n"
            "def score(completion):\n"
            "    try:\n"
            f"        open({str(workspace / 'ledger.db')!r}, 'r+')\n"
            "    except OSError:\n"
            "        return VALUE\n"
            "    return 0.0\n"
        )
        with open_reward(workspace / "cache", timeout=PATIENCE, hidden=[workspace / "cache", workspace]) as reward:
            assert reward.score(call("12"))[0].score == 0.5
        with open_reward(workspace / "cache", timeout=PATIENCE, hidden=[Path("/")]) as reward:
            assert reward.score(call("12"))[0].score == 0.5


class TestGroup:
    """A cgroup, on a pretended hierarchy: no machine of ours lends one with controllers."""

    def hierarchy(self, root: Path, controllers: str) -> Path:
        place = root / "user" / "job"
        place.mkdir(parents=True)
        (root / "cgroup.controllers").write_text("memory pids")
        for folder in (place, place.parent):
            (folder / "cgroup.subtree_control").write_text(controllers)
        return place

    def test_bounds_are_written_before_anybody_joins(self, tmp_path: Path) -> None:
        place = self.hierarchy(tmp_path, "cpu memory pids")
        group = Group.make(2**30, 256, tmp_path, "/user/job")
        assert group is not None
        assert group.folder.parent == place
        assert (group.folder / "memory.max").read_text() == str(2**30)
        assert (group.folder / "memory.swap.max").read_text() == "0"
        assert (group.folder / "pids.max").read_text() == "256"
        group.join()
        assert (group.folder / "cgroup.procs").read_text() == "0"
        (group.folder / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
        assert group.passed() == OVER_MEMORY

    def test_none_where_a_bound_is_missing(self, tmp_path: Path) -> None:
        self.hierarchy(tmp_path, "cpu memory")
        assert Group.make(2**30, 256, tmp_path, "/user/job") is None
        assert Group.make(2**30, 256, tmp_path / "none", "/user/job") is None


def living(mark: str) -> list[int]:
    """Processes that sleep for this long (a zombie has no command line)."""
    return [pid for pid in everyone() if command(pid) == b"sleep\0%s\0" % mark.encode()]


def everyone() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def descendants() -> list[int]:
    return below(os.getpid())


def command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def eventually(holds: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """Answers what it is sent, with an exclamation mark."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                made, _ = server.accept()
                with made:
                    made.sendall(made.recv(99) + b"!")

    threading.Thread(target=answer, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@contextlib.contextmanager
def resolving(name: str) -> Iterator[None]:
    """The job's resolver knows a name that no other does."""
    known = socket.getaddrinfo

    def resolve(host: str, *arguments: Any, **named: Any) -> Any:
        return known("127.0.0.1" if host == name else host, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        yield


IN_TMP = """
import os
from pathlib import Path

PLACE = Path({place!r})

def score(completion):
    kept = (PLACE / "word.txt").read_text() == "here" and not os.access(PLACE, os.W_OK)
    Path("/tmp/own").write_text("x")
    try:
        (PLACE / "more.txt").write_text("x")
    except OSError:
        return float(kept and sorted(os.listdir(PLACE.parent)) == [PLACE.name])
    return -1.0
"""


def test_an_environment_below_tmp_is_there_and_nothing_beside_it(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scratch is mounted at /tmp: it must not cover what lies there."""
    place = Path("/tmp") / f"posttrain-{uuid.uuid4().hex}" / "environment"
    place.mkdir(parents=True)
    try:
        (place / "word.txt").write_text("here")
        (place.parent / "secret.txt").write_text("x")
        monkeypatch.setattr("posttrain.sandbox.session._added", lambda: iter([place]))
        reward = opened(IN_TMP.format(place=str(place)))
        assert reward.score(call("x"))[0].score == 1.0
    finally:
        shutil.rmtree(place.parent)
