"""What every reward function honours, over the worker process and the in-process fake; then what only a process can."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posttrain.domain.errors import InputError, JobFailedError
from posttrain.engine.rewards.port import RewardCall, RewardError, RewardFunction, probe_call
from posttrain.engine.rewards.process import ProcessReward, open_reward
from posttrain.engine.rewards.scripted import ScriptedReward

SOURCES = {
    "exact": "def score(completion, answer):\n    return 1.0 if completion == answer else 0.0\n",
    "raises": "def score(completion, answer):\n    return 1 / len(completion.strip('x'))\n",
    "nan": "def score(completion):\n    return float('nan')\n",
    "infinite": "def score(completion):\n    return float('-inf')\n",
    "none": "def score(completion, answer):\n    return None if completion == '?' else 1.0\n",
    "short": "def score(completions, **columns):\n    return [1.0]\n",
}
SCRIPTS: dict[str, Callable[[RewardCall], list[float | None]]] = {
    "exact": lambda c: [float(t == r["answer"]) for t, r in zip(c.completions, c.rows, strict=True)],
    "raises": lambda c: [1 / len(t.strip("x")) for t in c.completions],
    "nan": lambda c: [float("nan") for _ in c.completions],
    "infinite": lambda c: [float("-inf") for _ in c.completions],
    "none": lambda c: [None if t == "?" else 1.0 for t in c.completions],
    "short": lambda c: [1.0],
}
FOREIGN = {
    "row": """
        def score(prompt, completion, answer, **row):
            return float(prompt == 'Q' and completion == answer and row['level'] == 3)
    """,
    "trl": """
        def exact(prompts, completions, **kwargs):
            return [float(c == a) for c, a in zip(completions, kwargs['answer'])]
    """,
    "trl async": """
        async def halves(completions, level, **kwargs):
            return [value / 2 for value in level]
    """,
    "trl chat": """
        def exact(prompts, completions, **kwargs):
            return [float(p[0]['content'] + c[0]['content'] == 'Q12') for p, c in zip(prompts, completions)]
    """,
    "verl": """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {'score': float(solution_str == ground_truth), 'source': data_source, 'bonus': extra_info['b']}
    """,
    "openrlhf": """
        def reward_func(queries, prompts, labels, **kwargs):
            return {'rewards': [float(q == p + label) for q, p, label in zip(queries, prompts, labels)]}
    """,
    "slime": """
        async def custom_rm(args, sample, **kwargs):
            return float(sample.response == sample.label)
    """,
    "areal": """
        def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
            return float(completions == answer) + len(completion_ids)
    """,
    "verifiers": """
        def correct(completion, answer, state, **kwargs):
            return float(state['answer'] == answer)
    """,
    "verifiers chat": """
        def correct(completion, state):
            return float(completion[-1]['content'] == '12')
    """,
}
DETACHES = """
import os, subprocess, time

def score(completion):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
            os._exit(0)
        os.wait()
    open("{started}", "w").close()
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
from test_reward_contract import call, living
from posttrain.engine.rewards.port import RewardError
from posttrain.engine.rewards.process import open_reward
started, patience = 0, 2 if ending == "time-out" else 300
while not started and patience <= 300:  # a busy machine may need more than two seconds to start what is to be killed
    reward = open_reward(Path(source), timeout=patience)
    try:
        reward.score(call("12"))
        started = len(living(mark))
    except RewardError as error:
        started = 3 if "time-out" in str(error) and Path(source).with_name("started").exists() else 0
    reward.close()
    patience *= 4
print(json.dumps({"notes": reward.notes, "started": started, "left": living(mark)}))
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
from test_reward_contract import call
from posttrain.engine.rewards.process import open_reward

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
FORBIDDEN = 77  # exit code of FORBID where it cannot take namespaces away
FORBID = """
for kind in user pid net mnt; do echo 0 > /proc/sys/user/max_${kind}_namespaces || exit 77; done
exec "$@"
"""
PATIENCE = 300.0  # seconds for what must happen, on a machine as busy as it likes
Opener = Callable[[str], RewardFunction]


def call(*completions: str, answer: str = "12", **columns: object) -> RewardCall:
    rows = [{"prompt": "Q", "answer": answer, **columns} for _ in completions]
    return RewardCall(["Q"] * len(completions), list(completions), rows)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def _write(source: str) -> Path:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(source))
        return path

    return _write


@pytest.fixture
def opened(write: Callable[[str], Path]) -> Iterator[Callable[..., ProcessReward]]:
    held: list[ProcessReward] = []

    def _open(source: str, entry: str | None = None, timeout: float = PATIENCE, dialect: str = "auto") -> ProcessReward:
        held.append(open_reward(write(source), entry, timeout=timeout, dialect=dialect, name="reward:mine@1"))
        return held[-1]

    yield _open
    for reward in held:
        reward.close()


@pytest.fixture(params=["process", "scripted"])
def open_any(request: pytest.FixtureRequest, opened: Callable[..., ProcessReward]) -> Opener:
    if request.param == "process":
        return lambda name: opened(SOURCES[name])
    return lambda name: ScriptedReward(SCRIPTS[name])


class TestEveryReward:
    def test_scores_in_order_and_again(self, open_any: Opener) -> None:
        reward = open_any("exact")
        for _ in range(2):
            scores = reward.score(call("12", "21", "12"))
            assert [s.score for s in scores] == [1.0, 0.0, 1.0]

    def test_nothing_to_score(self, open_any: Opener) -> None:
        assert open_any("exact").score(call()) == []

    def test_none_is_unscored_not_zero(self, open_any: Opener) -> None:
        assert [s.score for s in open_any("none").score(call("?", "12"))] == [None, 1.0]

    def test_raising_is_an_error_not_a_zero(self, open_any: Opener) -> None:
        with pytest.raises(RewardError, match="ZeroDivisionError"):
            open_any("raises").score(call("12", "x"))

    @pytest.mark.parametrize("kind", ["nan", "infinite"])
    def test_not_finite(self, open_any: Opener, kind: str) -> None:
        with pytest.raises(RewardError, match=r"finite numbers, got (nan|-inf) as score of completion 0 '12'"):
            open_any(kind).score(call("12"))

    def test_wrong_length(self, open_any: Opener) -> None:
        with pytest.raises(RewardError, match=r"one score per completion \(2\), got 1"):
            open_any("short").score(call("12", "21"))

    def test_closed_twice_then_refused(self, open_any: Opener) -> None:
        reward = open_any("exact")
        reward.close()
        reward.close()
        with pytest.raises(InputError, match="closed"):
            reward.score(call("12"))

    def test_errors_are_one_line_and_never_retried(self, open_any: Opener) -> None:
        with pytest.raises(JobFailedError) as caught:
            open_any("raises").score(call("x"))
        assert "\n" not in str(caught.value)
        assert not caught.value.retryable


class TestUserErrors:
    def test_names_file_line_and_completion(self, opened: Callable[..., ProcessReward]) -> None:
        reward = opened("def helper(t):\n    return t['a']\n\ndef score(completion):\n    return helper(completion)\n")
        with pytest.raises(RewardError, match=r"reward:mine@1: reward\.py:2 raised TypeError: .* completion 0 '12'"):
            reward.score(call("12"))

    def test_wrong_type(self, opened: Callable[..., ProcessReward]) -> None:
        with pytest.raises(RewardError, match=r"reward\.py:1 \(score\) must return a number or None .* got str"):
            opened("def score(completion):\n    return 'good'\n").score(call("12"))

    def test_batched_function_that_returns_no_list(self, opened: Callable[..., ProcessReward]) -> None:
        with pytest.raises(RewardError, match="list of scores, got float"):
            opened("def score(completions, **kwargs):\n    return 1.0\n").score(call("12"))

    def test_unknown_column(self, opened: Callable[..., ProcessReward]) -> None:
        with pytest.raises(InputError, match=r"parameter 'truth' is neither a column.*known: answer, completion"):
            opened("def score(completion, truth):\n    return 1.0\n").score(call("12"))

    @pytest.mark.parametrize(
        ("source", "entry", "error", "match"),
        [
            ("def score(completion:\n", None, InputError, r"reward\.py:1 is not valid Python"),
            ("def score(completion):\n    return 1\n", "scoer", InputError, "no function 'scoer'; it defines score"),
            ("def a(x): ...\ndef b(x): ...\n", None, InputError, "must define a function `score`, or one public"),
            ("def score(x, y):\n    return 1\n", None, InputError, "of no known dialect"),
            ("import nowhere_to_be_found\n", None, RewardError, r"reward\.py:1 raised ModuleNotFoundError"),
        ],
    )
    def test_what_cannot_be_loaded(
        self, opened: Callable[..., ProcessReward], source: str, entry: str | None, error: type[Exception], match: str
    ) -> None:
        with pytest.raises(error, match=match):
            opened(source, entry)

    def test_missing_source(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"reward source absent\.py does not exist"):
            open_reward(tmp_path / "absent.py", timeout=PATIENCE)
        (tmp_path / "a.py").touch()
        (tmp_path / "b.py").touch()
        with pytest.raises(InputError, match=r"must hold `reward\.py` or a single Python file, got a\.py, b\.py"):
            open_reward(tmp_path, timeout=PATIENCE)

    def test_probe_finds_a_broken_reward_before_step_one(self, opened: Callable[..., ProcessReward]) -> None:
        probe = probe_call(["Q"] * 9, [{"prompt": "Q", "answer": "1"}] * 9)
        assert probe.completions == ["1"] * 4
        with pytest.raises(RewardError, match="KeyError"):
            opened("def score(completion, row):\n    return row['gold']\n").score(probe)

    def test_call_of_unequal_columns(self) -> None:
        with pytest.raises(InputError, match=r"RewardCall\.rows must hold one entry per completion \(2\), got 1"):
            RewardCall(["a", "b"], ["c", "d"], [{}])


class TestDialects:
    CHAT = ({"role": "user", "content": "Q"},)

    @pytest.mark.parametrize(
        ("dialect", "expected"),
        [(name, {"trl async": 1.5, "areal": 3.0}.get(name, 1.0)) for name in FOREIGN if "chat" not in name],
    )
    def test_called_as_it_expects(self, opened: Callable[..., ProcessReward], dialect: str, expected: float) -> None:
        reward = opened(FOREIGN[dialect])
        assert reward.dialect == dialect.split()[0]
        row = {"prompt": "Q", "answer": "12", "level": 3, "data_source": "s", "extra_info": {"b": 2}}
        given = RewardCall(["Q"], ["12"], [row], [[1, 2]], [[3, 4]])
        [score] = reward.score(given)
        assert score.score == expected
        assert score.components == ({"bonus": 2.0} if dialect == "verl" else {})

    def test_trl_and_verifiers_get_messages_for_chat_rows(self, opened: Callable[..., ProcessReward]) -> None:
        chat = call("12", prompt=list(self.CHAT))
        for name in ("trl chat", "verifiers chat"):
            assert opened(FOREIGN[name]).score(chat)[0].score == 1.0

    def test_explicit_dialect_overrides(self, opened: Callable[..., ProcessReward]) -> None:
        source = "def f(completions, **kw):\n    return float(completions == '12')"
        assert opened(source, dialect="areal").score(call("12"))[0].score == 1.0
        with pytest.raises(InputError, match="dialect must be one of"):
            opened(source, dialect="klingon")

    def test_numpy_scores_and_ground_truth_of_verl_rows(self, opened: Callable[..., ProcessReward]) -> None:
        source = (
            "import numpy\ndef f(solution_str, ground_truth):\n    return numpy.float32(solution_str == ground_truth)"
        )
        assert opened(source).score(call("7", reward_model={"ground_truth": "7"}))[0].score == 1.0

    def test_entry_names_file_and_function(self, tmp_path: Path) -> None:
        (tmp_path / "rules.py").write_text("from parts import value\n\ndef mine(completion):\n    return value\n")
        (tmp_path / "parts.py").write_text("value = 0.25\n")
        reward = open_reward(tmp_path, "rules.py:mine", timeout=PATIENCE)
        try:
            assert reward.score(call("12"))[0].score == 0.25
        finally:
            reward.close()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["parts.py", "rules.py"]  # no bytecode beside the source

    def test_blob_without_suffix_keeps_its_name_in_errors(self, tmp_path: Path) -> None:
        blob = tmp_path / ("0" * 64)
        blob.write_text(SOURCES["raises"])
        reward = open_reward(blob, "score", timeout=PATIENCE, name="reward:x@1", source="exact.py")
        try:
            with pytest.raises(RewardError, match=r"reward:x@1: exact\.py:2 raised"):
                reward.score(call("x"))
        finally:
            reward.close()


class TestCell:
    @pytest.mark.parametrize("cell", ["namespaces", "none"])
    @pytest.mark.parametrize("ending", ["close", "time-out", "job killed"])
    def test_nothing_outlives_it(self, write: Callable[[str], Path], tmp_path: Path, cell: str, ending: str) -> None:
        mark = f"600.{uuid.uuid4().int % 10**12:012d}"  # seconds of sleep, by which the detached processes are found
        source = write(DETACHES.format(mark=mark, hang=ending != "close", started=str(tmp_path / "started")))
        program = [sys.executable, "-c", USES, str(source), ending, mark, str(Path(__file__).parent)]
        if cell == "none":
            program = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh", *program]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
            if ending == "job killed":
                until = time.monotonic() + PATIENCE
                while len(living(mark)) < 3 and job.poll() is None and time.monotonic() < until:
                    time.sleep(0.02)
                assert len(living(mark)) >= 3 or job.poll() == FORBIDDEN
                os.kill(job.pid, signal.SIGKILL)
            out, err = job.communicate(timeout=PATIENCE)
        if job.returncode == FORBIDDEN or (cell == "none" and not shutil.which("unshare")):
            pytest.skip("this machine makes no user namespaces, so the kernel that gives none cannot be played")
        if ending == "job killed":
            assert vanish(mark)
            return
        assert job.returncode == 0, err
        report = json.loads(out)
        assert report["started"] >= 3, "the reward's detached processes were there to be killed"
        assert report["left"] == []
        if cell == "none":
            assert [note.partition(":")[0] for note in report["notes"]] == [
                "the reward can reach the network",
                "the reward sees this machine's processes and can signal those of its user",
                "the reward can read and write what its user can, the workspace too",
            ]

    def test_processes_of_the_same_numbers_outside_live_on(self, write: Callable[[str], Path]) -> None:
        fresh = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if not shutil.which("unshare") or subprocess.run([*fresh, "true"], capture_output=True, check=False).returncode:
            pytest.skip("this machine makes no PID namespace for the test, where the numbers of processes are small")
        program = [sys.executable, "-c", AMONG_OTHERS, str(write(COUNTS)), str(Path(__file__).parent)]
        done = subprocess.run([*fresh, *program], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["same"], "processes inside had numbers of processes outside"
        assert report["died"] == []

    def test_hang_while_imported(self, opened: Callable[..., ProcessReward], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("posttrain.engine.rewards.process.START_TIMEOUT", 1.0)
        with pytest.raises(RewardError, match="time-out of 1 s to load"):
            opened("import time\ntime.sleep(600)\n", timeout=0.5)

    def test_exit_is_named(self, opened: Callable[..., ProcessReward]) -> None:
        with pytest.raises(RewardError, match=r"ended its process \(exit code 7\)"):
            opened("import os\ndef score(completion):\n    os._exit(7)\n").score(call("12"))
        with pytest.raises(RewardError, match="SystemExit: 3"):
            opened("import sys\ndef score(completion):\n    sys.exit(3)\n").score(call("12"))

    def test_prints_do_not_disturb_the_answers(
        self, opened: Callable[..., ProcessReward], capfd: pytest.CaptureFixture[str]
    ) -> None:
        reward = opened("def score(completion):\n    print('seen', completion, flush=True)\n    return 1\n")
        assert reward.score(call("12"))[0].score == 1.0
        assert "seen 12" in capfd.readouterr().err

    def test_environment_holds_no_secret(
        self, opened: Callable[..., ProcessReward], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
        seen = tmp_path / "environment"
        source = f"""
            import json, os
            def score(completion):
                json.dump(dict(os.environ), open({str(seen)!r}, "w"))
                return 1
        """
        opened(source).score(call("12"))
        assert "hush" not in json.loads(seen.read_text()).values()

    def test_no_network_where_the_kernel_lets_us(self, opened: Callable[..., ProcessReward]) -> None:
        source = """
            import socket
            def score(completion):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                    try:
                        s.connect(("192.0.2.1", 9))
                    except OSError:
                        return 1.0
                return 0.0
        """
        reward = opened(source)
        if any("network" in note for note in reward.notes):
            assert any("unshare failed" in note or "need Linux" in note for note in reward.notes)
        else:
            assert reward.score(call("12"))[0].score == 1.0

    def test_files_and_memory_are_limited(self, opened: Callable[..., ProcessReward], tmp_path: Path) -> None:
        big = f"def score(completion):\n    open({str(tmp_path / 'big')!r}, 'wb').truncate(1 << 31)\n    return 1\n"
        with pytest.raises(RewardError, match=r"OSError|signal 25"):
            opened(big).score(call("12"))
        with pytest.raises(RewardError, match="MemoryError"):
            opened("def score(completion):\n    return len(bytearray(1 << 40))\n").score(call("12"))

    def test_same_call_same_scores_with_random_numbers(self, opened: Callable[..., ProcessReward]) -> None:
        source = "import random\ndef score(completion):\n    return random.random()\n"
        first, second = opened(source), opened(source)
        first.score(call("warm", "up"))
        assert first.score(call("a", "b")) == second.score(call("a", "b"))
        assert first.score(call("a", "b")) != first.score(call("a", "c"))

    def test_processes_and_privileges_are_limited(self, opened: Callable[..., ProcessReward]) -> None:
        source = """
            import re, resource
            def score(completion):
                status = open("/proc/self/status").read()
                capable = int(re.search(r"CapEff:\\s*(\\w+)", status)[1], 16)
                regain = int(re.search(r"NoNewPrivs:\\s*(\\w+)", status)[1])
                return {"score": resource.getrlimit(resource.RLIMIT_NPROC)[1], "capable": capable, "final": regain}
        """
        [score] = opened(source).score(call("12"))
        assert score.score is not None
        assert 256 <= score.score < 100_000
        assert score.components == {"capable": 0.0, "final": 1.0}

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
        reward = open_reward(
            workspace / "cache", timeout=PATIENCE, hidden=[workspace / "cache", workspace, tmp_path / "none"]
        )
        try:
            exposed = any("read and write" in note for note in reward.notes)
            assert reward.score(call("12"))[0].score == (0.0 if exposed else 0.5)
        finally:
            reward.close()
        assert (workspace / "ledger.db").read_text() == "the answers"

    def test_a_folder_it_runs_on_is_not_hidden(self, write: Callable[[str], Path]) -> None:
        with open_reward(write(SOURCES["exact"]), timeout=PATIENCE, hidden=[Path("/")]) as reward:
            assert reward.score(call("12"))[0].score == 1.0
            assert "the reward can read and write /: it holds what the reward runs on" in reward.notes


def living(mark: str) -> list[int]:
    """Processes that sleep for this long (a zombie has no command line)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes() == b"sleep\0%s\0" % mark.encode():
                found.append(int(entry.name))
    return found


def vanish(mark: str) -> bool:
    """Whether they all go."""
    until = time.monotonic() + PATIENCE
    while living(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not living(mark)
