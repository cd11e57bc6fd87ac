"""What runs a job on a node that shares no disk with its driver: real processes, a mailbox and a store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.domain.errors import ConflictError, InputError, UnavailableError, WorkspaceError
from posttrain.domain.jobs import ANOTHER_RUNS, JobOrder, Progress
from posttrain.domain.jobspec import JobSpec
from posttrain.execution import processes
from posttrain.execution.agent import Agent, Relay, _Beat
from posttrain.store.attempts import AttemptFolder, mailbox_at, spending
from posttrain.store.blobs import open_blobs
from posttrain.store.mailbox import METER, ORDER, REQUEST, MailboxObjects
from posttrain.store.staging import StagedAttempt

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PATIENCE = 300.0  # seconds; a machine may be as busy as it likes


class Node:
    """A machine with agents, and the driver's end of one attempt."""

    def __init__(self, root: Path) -> None:
        self.root, self.started = root, list[subprocess.Popen[str]]()
        self.blobs = open_blobs(root / "store")
        self.url = (root / "mail" / "run" / "train" / "001").as_uri()
        self.mailbox = mailbox_at(self.url)
        self.attempt = StagedAttempt(root / "nothing", self.url, "run-train-1", self.blobs.url)
        self.hold, self.most, self.lacks = root / "hold", None, ""

    def order(self, mode: str = "plain", **words: Any) -> None:
        order = {"store_url": self.blobs.url, "inputs": {}, "params": {}, "cache_dir": "", **words}
        self.mailbox.replace(ORDER, JobOrder("run-train-1", "train", 0, epoch=1, **order).to_json())
        environment = {"PYTHONPATH": str(HERE), "JOB_MODE": mode, "JOB_HOLD": str(self.hold)}
        spec = JobSpec("run-train-1", self.url, "far_job", environment, secrets=("JUDGE_KEY",), epoch=1)
        spec = replace(spec, max_seconds=self.most, grace_seconds=1.0)
        self.mailbox.once(REQUEST, spec.to_json())

    def start(self, incarnation: int = 0) -> subprocess.Popen[str]:
        own = {"POSTTRAIN_SCRATCH": str(self.root / "scratch"), "POSTTRAIN_INCARNATION": str(incarnation)}
        own |= {"PATH": os.environ["PATH"], "AWS_SECRET_ACCESS_KEY": "the-nodes", "JUDGE_KEY": "a-judges-key"}
        own.pop(self.lacks, None)
        command = [sys.executable, "-m", "posttrain.execution.agent", self.url]
        process = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.started.append(process)
        return process

    def ends(self, process: subprocess.Popen[str]) -> int:
        process.communicate(timeout=PATIENCE)
        return process.returncode

    def steps(self) -> list[int]:
        return [fact.step for fact in self.attempt.facts()[0] if isinstance(fact, Progress)]

    def log(self) -> str:
        text = b""
        while piece := self.mailbox.logged(len(text)):
            text += piece
        return text.decode()

    def jobs(self) -> list[int]:
        return processes.carrying("JOB_HOLD", str(self.hold))

    def holding(self) -> subprocess.Popen[str]:
        """An agent whose job waits in its second step, with that step's checkpoint staged."""
        self.hold.touch()
        self.order(token_allowance=100)
        agent = self.start()
        wait_until(lambda: 2 in self.attempt.checkpoint_steps() and self.steps()[-1:] == [2])
        return agent


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.hold.unlink(missing_ok=True)
    for process in made.started:
        process.kill()
        process.communicate()
    wait_until(lambda: not made.jobs())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_a_job_elsewhere_leaves_what_a_job_here_leaves_and_the_node_keeps_nothing(node: Node) -> None:
    node.order()
    assert node.ends(node.start()) == 0
    result = node.attempt.read_result()
    assert result is not None
    assert (result.status, result.tokens) == ("succeeded", 30)
    assert node.steps() == [1, 2, 3]
    assert node.attempt.spent() == 35
    digest = node.attempt.store_output(node.blobs, "table", result.outputs["table"])
    assert node.blobs.get(digest) == b"1, 2, 3"
    assert node.attempt.checkpoint_steps()[-1] == 3
    found = node.attempt.store_checkpoint(node.blobs, 3)
    assert found is not None
    assert found.tokens == 30
    log = node.log()
    assert "step 3" in log
    variables = log.partition("variables ")[2].splitlines()[0].split()
    assert "JUDGE_KEY" in variables
    own = [name for name in variables if name.startswith(("AWS_", "POSTTRAIN_"))]
    assert own == ["POSTTRAIN_GANG"], "none of the node's keys; the job runs on one node"
    assert list((node.root / "scratch").iterdir()) == []
    assert not (node.root / "nothing").exists()
    written = sorted(path for path in (node.root / "mail").rglob("*") if path.is_file())
    assert node.ends(node.start()) == ANOTHER_RUNS
    assert sorted(path for path in (node.root / "mail").rglob("*") if path.is_file()) == written


def test_a_requeued_job_goes_on_from_its_checkpoint_with_what_is_left_of_its_budget(node: Node) -> None:
    first = node.holding()
    wait_until(lambda: node.attempt.spent() == 25)
    first.kill()
    wait_until(lambda: not node.jobs())  # it dies with its agent
    node.hold.unlink()
    assert node.ends(node.start(incarnation=1)) == 0
    assert node.steps() == [1, 2, 3]
    assert "allowance 95" in node.log(), "5 tokens were spent beyond the checkpoint of step 2"
    result = node.attempt.read_result()
    assert result is not None
    assert (result.tokens, node.attempt.spent()) == (35, 40)
    held = node.mailbox.started()
    assert held is not None
    assert held.incarnation == 1
    assert node.ends(node.start(incarnation=1)) == ANOTHER_RUNS
    assert node.ends(node.start(incarnation=0)) == ANOTHER_RUNS, "its former self is refused"


def test_an_earlier_incarnation_that_still_writes_lowers_no_bill(tmp_path: Path) -> None:
    outside = mailbox_at((tmp_path / "outside").as_uri())
    (tmp_path / "outside").mkdir()
    relays = []
    for incarnation, (spent, before) in enumerate([(20, 0), (30, 10)]):
        folder = AttemptFolder(tmp_path / f"node {incarnation}", "")
        folder.path.mkdir()
        (folder.path / METER).write_text(f"{spent:020d} {0:020d}\n")
        relays.append(Relay(folder, outside, incarnation))
        relays[-1].spent = before
    for relay in reversed(relays):  # the later one first
        relay.up()
    assert spending(outside.metered()) == 40


def test_of_two_incarnations_that_overlap_the_later_one_ends_the_attempt(node: Node) -> None:
    """A scheduler that took a node for dead; the node comes back."""
    first = node.holding()
    second = node.start(incarnation=1)
    assert node.ends(first) not in (0, ANOTHER_RUNS)
    node.hold.unlink()
    assert node.ends(second) == 0
    assert node.steps() == [1, 2, 3]
    assert node.attempt.read_result() is not None


def test_a_job_that_prints_without_end_keeps_its_limit_of_seconds(node: Node) -> None:
    node.most = 3.0
    node.order("floods")
    assert node.ends(node.start()) == 0
    result = node.attempt.read_result()
    assert result is not None
    assert result.failure is not None
    assert (result.failure.kind, "maximum runtime" in result.failure.message) == ("budget", True)


def test_a_job_that_damages_its_reports_has_failed_or_ends_like_one_here(node: Node) -> None:
    node.order("damages")
    assert node.ends(node.start()) in (0, 1)


def test_an_exit_code_of_the_job_is_no_word_of_the_agent(node: Node) -> None:
    node.order("clashes")
    assert node.ends(node.start()) == 1


def test_a_scratch_folder_that_others_may_write_is_refused(node: Node) -> None:
    node.order()
    (node.root / "scratch").mkdir(mode=0o777)
    (node.root / "scratch").chmod(0o777)
    agent = node.start()
    said, _ = agent.communicate(timeout=PATIENCE)
    assert agent.returncode == 2
    assert "must be a folder that only this user can write" in said
    assert node.mailbox.started() is None


def test_an_agent_that_is_overtaken_ends_its_job_and_publishes_nothing(node: Node) -> None:
    """A node that was lost and comes back, or an attempt that was ended meanwhile."""
    agent = node.holding()
    node.mailbox.bury(1, "the attempt was ended", begun=True)
    assert node.ends(agent) not in (0, ANOTHER_RUNS)
    assert node.jobs() == []
    assert node.attempt.read_result() is None
    assert "the attempt was ended" in node.log()
    assert node.ends(node.start(incarnation=1)) == ANOTHER_RUNS


def test_an_order_to_stop_reaches_the_job_and_its_result_the_driver(node: Node) -> None:
    agent = node.holding()
    node.attempt.request_stop()
    assert node.ends(agent) == 0
    result = node.attempt.read_result()
    assert result is not None
    assert (result.status, result.tokens) == ("stopped", 20)


def test_a_preempted_job_writes_its_checkpoint_and_no_result(node: Node) -> None:
    """A scheduler sends SIGTERM, waits, kills, and requeues: the attempt goes on."""
    agent = node.holding()
    agent.send_signal(signal.SIGTERM)
    wait_until(lambda: "another incarnation continues it" in node.log())
    assert node.jobs() == []
    assert agent.poll() is None, "a job that ends by itself is not requeued"
    agent.kill()
    assert node.attempt.read_result() is None
    node.hold.unlink()
    assert node.ends(node.start(incarnation=1)) == 0
    assert node.attempt.read_result() is not None


@pytest.mark.parametrize(
    ("mode", "words", "says"),
    [
        (
            "plain",
            {"code": {"native": f"sha256:{'0' * 64}"}},
            "its trainer 'native' and libraries have the digest",
        ),
        ("plain", {"resume": f"sha256:{'0' * 64}"}, "is not in the artifact store"),
        ("babbles", {}, "result.json"),
        ("escapes", {}, "output table must be a file or folder below outputs/, got '/etc/passwd'"),
    ],
)
def test_what_cannot_be_computed_here_is_a_failed_result_in_one_line(
    node: Node, mode: str, words: dict[str, Any], says: str
) -> None:
    node.order(mode, **words)
    assert node.ends(node.start()) == 0
    result = node.attempt.read_result()
    assert result is not None
    assert result.failure is not None
    assert says in result.failure.message
    assert "\n" not in result.failure.message


def test_a_secret_that_the_node_lacks_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.order()
    node.lacks = "JUDGE_KEY"
    assert node.ends(node.start()) == 0
    result = node.attempt.read_result()
    assert result is not None
    assert result.failure is not None
    assert "job run-train-1 needs JUDGE_KEY in the environment of its agent" in result.failure.message
    assert node.steps() == []


def test_an_agent_that_is_overtaken_while_it_fetches_publishes_no_failure(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failed result would end the attempt, which the later incarnation computes."""
    node.order()
    taken = Agent(node.url, 0, node.root / "scratch")

    def fetch(*_: object) -> tuple[int, float]:
        node.mailbox.start(1, "the later one", incarnation=1)
        raise InputError("this node is broken")

    monkeypatch.setattr(Agent, "_fetch", fetch)
    monkeypatch.setenv("JUDGE_KEY", "a-judges-key")
    with pytest.raises(ConflictError, match="a later incarnation of the job has begun"):
        taken.run()
    assert node.attempt.read_result() is None


def test_a_job_that_dies_passes_its_exit_code_on_and_leaves_its_last_checkpoint(node: Node) -> None:
    node.order("dies")
    assert node.ends(node.start()) == 9
    assert node.attempt.read_result() is None
    assert node.attempt.checkpoint_steps()[-1] == 2
    assert "step 2" in node.log()


def test_a_store_that_does_not_answer_is_no_word_about_the_job(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.order(store_url="s3://nowhere/store", resume=f"sha256:{'0' * 64}")
    assert node.ends(node.start()) != 0
    assert node.attempt.read_result() is None
    assert list((node.root / "scratch").iterdir()) == []


class Filling:
    """A mailbox's objects in a store that is full for a while: facts and then the result do not fit at first."""

    def __init__(self, objects: MailboxObjects) -> None:
        self._objects, self.refused = objects, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def create(self, key: str, data: bytes) -> bool:
        if key.startswith(("events/", "result.json")) and self.refused.count(key) < 2:
            self.refused.append(key)
            raise WorkspaceError("the store is full; free some space")
        return self._objects.create(key, data)


def test_a_store_that_is_full_for_a_while_costs_no_work(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = mailbox_at(node.url)
    filled._objects = full = Filling(filled._objects)
    monkeypatch.setattr("posttrain.execution.agent.mailbox_at", lambda url: filled)
    monkeypatch.setenv("JUDGE_KEY", "a-judges-key")
    node.hold.touch()  # the job waits in its second step until the store was full
    node.order(token_allowance=100)

    def go_on() -> None:
        wait_until(lambda: full.refused.count("events/000001.jsonl") == 2)
        node.hold.unlink()

    with ThreadPoolExecutor(1) as beside:
        going_on = beside.submit(go_on)
        assert Agent(node.url, 0, node.root / "scratch").run() == 0
        going_on.result()
    assert {"events/000001.jsonl", "result.json"} <= set(full.refused)
    result = node.attempt.read_result()
    assert result is not None
    assert result.status == "succeeded"


def test_a_job_that_reports_nothing_is_given_up_when_the_store_refuses_every_request_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr("posttrain.execution.agent.time", clock)

    def down() -> None:
        raise UnavailableError("connection refused")

    relay = SimpleNamespace(up=lambda: None, log=lambda: None, newest=lambda: None, down=down)
    agent = Agent("file:///nowhere", 0, tmp_path)
    beat = _Beat(agent, relay, None)  # type: ignore[arg-type]
    while now[0] < 1000 and not agent.lost:
        beat()
        now[0] += 0.25
    assert 600 < now[0] < 610
    assert "the store has taken nothing for 600 s: connection refused" in agent.lost


def test_the_ray_cluster_of_a_gang_gets_its_token_and_no_key_of_the_node(tmp_path: Path) -> None:
    (tmp_path / "ray" / "scripts").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    (tmp_path / "ray" / "scripts" / "scripts.py").write_text("import os, sys; print(sys.argv[1:], sorted(os.environ))")
    own = {"PATH": os.environ["PATH"], "AWS_SECRET_ACCESS_KEY": "the-nodes", "RAY_AUTH_TOKEN": "of-the-gang"}
    words = [sys.executable, "-m", "posttrain.execution.agent", "ray", "start", "--head"]
    done = subprocess.run(words, env=own, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert "['start', '--head']" in done.stdout
    assert "RAY_AUTH_TOKEN" in done.stdout
    assert "AWS" not in done.stdout


def test_an_agent_without_a_job_says_what_is_missing(node: Node) -> None:
    agent = node.start()
    said, _ = agent.communicate(timeout=PATIENCE)
    assert agent.returncode == 2
    assert said.startswith("error: mailbox ")
    assert "must contain job.json and request.json" in said
