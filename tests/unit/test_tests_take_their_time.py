"""No test may depend on how fast the machine is: sleeps and short time-outs are refused, but for those listed here.
Nor may the product: its own waits for what must happen are long enough for a machine that is busy.

A test waits for a state, with a deadline so long that only a hang meets it. A test of a deadline waits on something
that provably never comes, or gives the product a clock of its own. What is left is named below with its reason.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SHORTEST = 10.0  # seconds
FOREVER = 600.0  # seconds; what sleeps so long is there to never answer
SLEEP = re.compile(r"(?<!def )(?<!clock\.)\bsleep\((?P<value>[^()]*(?:\([^()]*\))?[^()]*)\)")
# in lower case patience is early stopping's, which counts probes
SHORT = re.compile(
    r"""(?:\w*(?:time_?out|seconds|deadline|(?-i:PATIENCE)|grace)\w*["']?\s*(?:=|:\s*\w*\s*=|[:,])\s*["']?
        |\.(?:wait|within|join)\(
        |--timeout["']?[,\s]+["']?)
        (?P<value>\d+(?:\.\d+)?(?:e\d+)?)\b""",
    re.IGNORECASE | re.VERBOSE,
)
POLL = "a look in a loop whose deadline is minutes away"
NEVER = "what it waits for never comes, so the shorter the better"
SAID = "a number that is said or stored; nobody waits so long"
PAST = "a moment long ago"
TURN = "others have their turn; no time passes"
_SLOW = 'bench.write("slow.py", "import time\\n" + SHORT.replace("    return", "    time.sleep(0.4)\\n    return"))'
_LOW = "PartitionName=low Nodes=ada,bob Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=5 MaxTime=60 State=UP"
_HUNG = 'assert "lm-eval sent no request for 2 s" in failed(home, "hang", {"timeout": 2})'
ALLOWED = {
    ("e2e/test_clusters.py", _SLOW): "the reward's own work",
    ("ray_cluster.py", "time.sleep(1.0)"): POLL,
    ("e2e/test_harness_stages.py", _HUNG): NEVER,
    ("e2e/test_judge_models.py", "time.sleep(2)"): "the reward's own work",
    ("e2e/test_served_ordeal.py", "time.sleep(0.1)"): "a client's own wait before it asks again",
    ("vllm_server/test_vllm_server.py", "time.sleep(0.5)"): POLL,
    ("unit/test_serving.py", "await asyncio.sleep(0)"): TURN,
    ("unit/test_serving.py", "await asyncio.sleep(0.001)"): POLL,
    ("slurm_cluster.py", _LOW): "Slurm's own, in which a job writes its checkpoint; it is killed later than that",
    ("slurm_cluster.py", "time.sleep(0.1)"): POLL,
    ("e2e/test_fuzz.py", "time.sleep(0.02)"): "a reward's own work",
    ("e2e/test_budget.py", "time.sleep(0.01)"): POLL,
    ("contract/test_reward_cell.py", "time.sleep(0.05)"): "the reward's own work",
    ("contract/test_starved_jobs.py", "time.sleep(0.05)"): POLL,
    ("contract/test_starved_jobs.py", "time.sleep(0.1)"): POLL,
    ("e2e/test_confined.py", "time.sleep(0.01)"): POLL,
    ("sink_servers.py", "while not known.over.wait(0.05):"): "a slow receiver's own work",
    ("contract/device_job.py", "_SPELL_SECONDS = 0.2"): "the job's own work",
    ("contract/device_job.py", "time.sleep(_SPELL_SECONDS)"): "the job's own work",
    ("contract/device_job.py", "time.sleep(0.01)"): "the job's own work until it is told to leave",
    ("contract/test_device_locks.py", "time.sleep(0.01)"): POLL,
    ("contract/channel_jobs.py", "time.sleep(0.01)"): "the job's own work until it is told to leave",
    ("contract/test_channel_contract.py", "time.sleep(0.01)"): POLL,
    ("contract/far_job.py", "time.sleep(0.02)"): "the job's own work until it is told to leave",
    ("contract/test_agent.py", "time.sleep(0.02)"): POLL,
    ("contract/test_agent.py", "spec = replace(spec, max_seconds=self.most, grace_seconds=1.0)"): NEVER,
    ("contract/executor_job.py", "time.sleep(0.01)"): "the job's own work until it is told to leave",
    ("contract/executor_late_supervisor.py", "time.sleep(0.01)"): POLL,
    ("contract/group_workers.py", "self.sleep(seconds)"): NEVER,
    ("contract/group_workers.py", "time.sleep(0.01)"): POLL,
    ("contract/test_cluster.py", "time.sleep(0.1)"): POLL,
    (
        "contract/test_ledger_contract.py",
        "time.sleep(0.3)",
    ): "who does not wait for the other is seen; who waits never is",
    ("contract/test_cluster.py", "with open_cluster(address, seconds=5):"): NEVER,
    ("contract/test_environment.py", "time.sleep(0.02)"): POLL,
    (
        "contract/test_sharded_roles.py",
        "assert whole.sleep() > 0",
    ): "memory is freed; no time passes",
    (
        "contract/sharded_roles.py",
        "assert parted.sleep() == parted.resident_bytes() == sum(p.numel() * p.element_size() for p in held)",
    ): "memory is freed; no time passes",
    ("contract/test_forkserver.py", "NEVER_SECONDS = 0.1"): NEVER,
    ("contract/test_forkserver.py", "time.sleep(0.01)"): POLL,
    ("contract/test_executor_contract.py", "NEVER_SECONDS = 0.1"): NEVER,
    ("contract/test_executor_contract.py", "time.sleep(0.01)"): POLL,
    ("contract/test_foreground.py", "time.sleep(0.02)"): POLL,
    ("contract/test_foreground.py", "for _ in answers(name, {}, timeout=1.0):"): NEVER,
    ("contract/test_group_contract.py", 'clusters().backend("late", 8, start_seconds=1)'): NEVER,
    ("contract/test_group_contract.py", "policy.within(0.3).each(gw.Policy.sleep_on, 1, 1.5)"): NEVER,
    ("contract/test_group_contract.py", 'policy = pools(1).start("policy", gw.Policy).within(0.2)'): NEVER,
    ("contract/test_group_contract.py", "policy.within(0.5).each(gw.Policy.sleep_on, 1, 60.0)"): NEVER,
    (
        "contract/test_reward_cell.py",
        'monkeypatch.setattr("posttrain.sandbox.process.LOAD_TIMEOUT", 1.0)',
    ): NEVER,
    ("contract/test_observer.py", "await asyncio.sleep(0)"): "a turn of the loop",
    ("contract/test_observer.py", 'monkeypatch.setattr("posttrain.sandbox.observer.PING_TIMEOUT", 1.0)'): NEVER,
    ("contract/test_observer.py", "observer = opened(concurrency, timeout=0.5)"): NEVER,
    ("contract/test_observer.py", "threading.Event().wait(0.02)"): POLL,
    ("contract/test_observer.py", "until.wait(0.05)"): POLL,
    (
        "contract/test_observer.py",
        "threading.Event().wait(0.5)",
    ): "so that a call holds the lock before others are sent; the outcome is the same",
    ("contract/test_reward_cell.py", 'opened("import time\\ntime.sleep(600)\\n", timeout=0.5)'): NEVER,
    (
        "contract/test_reward_cell.py",
        'reward = open_reward(Path(source), timeout=2 if ending == "time-out" else 300)',
    ): NEVER,
    ("contract/test_reward_cell.py", "time.sleep(0.01)"): "a reward's own, in a loop that its bound ends",
    ("contract/test_reward_cell.py", "time.sleep(0.02)"): POLL,
    (
        "contract/test_reward_contract.py",
        'reward = opened(source, timeout=3.0 if status == "timeout" else PATIENCE)',
    ): NEVER,
    ("contract/test_ledger_contract.py", "with work.opened(ledger_at, busy_seconds=0.2) as hurried:"): NEVER,
    ("contract/test_reward_contract.py", "reward = opened(source, timeout=5.0)"): NEVER,
    ("contract/test_reward_contract.py", "reward._timeout = 5.0"): NEVER,
    ("contract/test_reward_contract.py", 'scores = opened(source, timeout=5.0).score(call(*"abcd"))'): NEVER,
    (
        "contract/test_reward_contract.py",
        'reward = opened(textwrap.dedent(self.FORGES).replace("{attack}", attack), timeout=1.0)',
    ): NEVER,
    (
        "contract/test_foreground.py",
        "name = program(\"while os.getppid() == asked['asked_by']: time.sleep(0.1)\")",
    ): POLL,
    ("e2e/fuzzing.py", "time.sleep(0.02)"): POLL,
    ("e2e/held.py", "time.sleep(0.01)"): "the job's own work until it is told to leave",
    (
        "e2e/fuzzing.py",
        "time.sleep(self.rng.uniform(0.1, _LONGEST_STOP))",
    ): "how long a process is stopped: any time will do",
    ("e2e/test_bad_input.py", 'patience = {"reward_timeout": 0.5} if source == HANGS else {}'): NEVER,
    (
        "e2e/test_recovery.py",
        'return f"import time\\n\\n{SHORT}".replace("    return", f"    time.sleep({seconds} / 16)\\n    return")',
    ): "a reward that takes its time, so that the steps before a death have been told of; slower is as good",
    ("e2e/test_recovery.py", "time.sleep(0.02)"): POLL,
    ("e2e/test_jobs_in_images.py", "time.sleep(0.05)"): "the job's own work until it is told to go on",
    ("e2e/test_postgres_ordeal.py", "time.sleep(0.02)"): POLL,
    ("e2e/workbench.py", "time.sleep(0.03)"): POLL,
    ("unit/test_server_bounds.py", 'monkeypatch.setattr("posttrain.server.connections.HEADER_SECONDS", 0.2)'): NEVER,
    ("unit/test_server_bounds.py", 'monkeypatch.setattr("posttrain.server.limits.PIECE_SECONDS", 0.2)'): NEVER,
    ("unit/test_server_bounds.py", 'monkeypatch.setattr("posttrain.server.limits.BODY_SECONDS", 0.2)'): NEVER,
    ("unit/test_preflight_cluster_checks.py", 'monkeypatch.setattr(machine, "_RESOLVE_SECONDS", 0.01)'): NEVER,
    (
        "unit/test_control_hazards.py",
        'bench.jobs.folders.of(attempt).write_result(JobResult("stopped", seconds=5.0))',
    ): SAID,
    (
        "unit/test_engine_groups_typing.py",
        '("method by name", "group.each(\'step\', 0.1)", "group.within(3).each(Worker.step, 0.1)"),',
    ): "a line for the type checker, never run",
    ("unit/test_data_fitting.py", 'monkeypatch.setattr("posttrain.data.fit._RENDER_SECONDS", 0.5)'): NEVER,
    ("unit/test_data_fitting.py", 'monkeypatch.setattr(f"{module}._RENDER_SECONDS", 0.5)'): NEVER,
    ("unit/test_evaluate_job.py", 'monkeypatch.setattr("posttrain.engine.evaluation.evaluate._SECONDS", 0.2)'): NEVER,
    ("unit/test_engine_training.py", "desk = Desk(tmp_path, sft(), limits=Limits(deadline=1.0))"): PAST,
    (
        "unit/test_evaluate_job.py",
        'evaluate_suite("h", config, items, rollout, tokenizer, seed=0, meter=Meter(deadline=1.0))',
    ): PAST,
    ("unit/test_cli_erase.py", "ledger = Ledger(Database(file, busy_seconds=0.2))"): NEVER,
    (
        "unit/test_server_forwarding.py",
        'monkeypatch.setattr("posttrain.server.connections._FIRST_SECONDS", 0.5)',
    ): NEVER,
    ("unit/test_server_bounds.py", "await asyncio.sleep(0)"): TURN,
    ("unit/test_server_workers.py", "await asyncio.sleep(0)"): TURN,
    ("unit/test_server_operations.py", "await asyncio.sleep(0)"): TURN,
    ("unit/test_server_operations.py", "time.sleep(0.01)"): POLL,
    ("unit/test_server_attempts.py", "time.sleep(0.01)"): POLL,
    ("unit/test_server_bounds.py", "time.sleep(0.01)"): POLL,
    ("unit/test_limits.py", "time.sleep(0.01)"): POLL,
    ("unit/test_store_database.py", 'second = Database(tmp_path / "l.db", busy_seconds=0.05)'): NEVER,
    (
        "unit/test_web_trace.py",
        'said += [Span("rollout", step, at, seconds), Span("update", step, at + seconds, 0.5)]',
    ): SAID,
    ("unit/test_web_trace.py", "seconds = 4.0 if step == slow else 1.0"): SAID,
}


@functools.cache
def found() -> set[tuple[str, str]]:
    """(file, line) of every sleep that ends and of every short time-out."""
    lines: set[tuple[str, str]] = set()
    for path in sorted(TESTS.rglob("*.py")):
        if path == Path(__file__):
            continue
        for line in path.read_text().splitlines():
            code = line.partition("  # ")[0].strip()
            sleeps = [match["value"] for match in SLEEP.finditer(code)]
            hurried = any(seconds(value) < FOREVER for value in sleeps)
            if hurried or any(0 < float(match["value"]) < SHORTEST for match in SHORT.finditer(code)):
                lines.add((path.relative_to(TESTS).as_posix(), code))
    return lines


def seconds(written: str) -> float:
    """The number that is written; 0 where an expression is."""
    try:
        return float(written.rpartition(",")[2])
    except ValueError:
        return 0.0


def test_no_test_hurries() -> None:
    fresh = sorted(found() - ALLOWED.keys())
    assert not fresh, f"wait for a state with a long deadline, or add a reason to {Path(__file__).name}: {fresh}"


def test_every_exception_is_still_there() -> None:
    assert sorted(ALLOWED.keys() - found()) == []


SOURCES = TESTS.parent / "src" / "posttrain"
WAIT = re.compile(
    r"^(?P<name>_?[A-Z_]*(?:SECONDS|TIMEOUT|GRACE|CLOSING|LEAVING|ALONE|PATIENCE)\w*)\s*=\s*(?P<value>[0-9.]+)", re.M
)
SHORT_WAITS = {
    "execution/ports.py:_TRIAL_SECONDS": "a back-end that was silent before is asked again half a minute later",
    "execution/ports.py:_WAIT_SECONDS": "then the work is tried again later, and other work begins",
    "app/executors.py:_LOOK_SECONDS": "between two looks at a probe",
    "execution/agent.py:_FENCE_SECONDS": "between two looks at who has the attempt",
    "execution/agent.py:_OVERLAP_SECONDS": "longer than an earlier incarnation needs to end itself",
    "execution/agent.py:_RELAY_SECONDS": "between two looks at the job's mailbox",
    "execution/agent.py:_LOOK_SECONDS": "between two looks at the attempt's mailbox",
    "execution/agent.py:_LOG_SECONDS": "after which the job's output is relayed",
    "execution/agent.py:_SERVER_SECONDS": "a server that is away longer is asked again in the next round",
    "server/connections.py:LOOK_SECONDS": "between two looks at who there is",
    "server/connections.py:_CONNECT_SECONDS": "a server that is away longer is asked again later; this one answers",
    "server/limits.py:RETRY_SECONDS": "what a client is told to wait before it asks again",
    "control/reconciler.py:RACED_SECONDS": "until whoever lost a race looks again; nothing ends with it",
    "control/reconciler.py:POLL_SECONDS": "between two questions to the queue; nothing ends with it",
    "control/reconciler.py:SLOT_SECONDS": "between two looks for slots that other processes left; nothing ends with it",
    "control/wakeups.py:OBSERVE_SECONDS": "between two readings of what jobs report; nothing ends with it",
    "events/ports.py:CONNECT_SECONDS": "a receiver that is away longer is tried again later, and nothing is lost",
    "trackers/choice.py:_SECONDS": "a server that is away longer is told, and tried again later",
    "views/logs.py:_ALONE": "told a little early, nothing else: a driver may follow",
    "data/fit.py:_MEAN_SECONDS": "a mean over rows, looked at after ten seconds; a rendering takes a thousandth",
    "engine/evaluation/evaluate.py:_SECONDS": "100,000 times what it takes: a pattern cannot hang a run",
    "sandbox/session.py:END_TIMEOUT": "then the keeper is killed, which ends its namespace all the same",
    "execution/executors/local/containers.py:_AGAIN_SECONDS": "between two tries to remove a container",
    "execution/executors/local/executor.py:_POLL_SECONDS": "between two looks",
    "execution/executors/local/forkserver.py:_END_SECONDS": "then an idle process is killed",
    "execution/processes.py:HEARTBEAT_SECONDS": "between two signs of life",
    "store/operations.py:_LOOKED_SECONDS": "between two notes that somebody looked",
}


def test_no_wait_of_the_product_is_short() -> None:
    short = {
        f"{path.relative_to(SOURCES).as_posix()}:{match['name']}"
        for path in SOURCES.rglob("*.py")
        for match in WAIT.finditer(path.read_text())
        if float(match["value"]) < SHORTEST
    }
    assert short == SHORT_WAITS.keys()
