"""What the Slurm adapter makes of answers that are lost, cut off, late, of another request, or in another language.

Slurm's commands are played by a script that keeps the queue in a file; `make slurm` asks the real ones.
"""

from __future__ import annotations

import json
import random
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.domain.errors import CapacityError, InfrastructureError, InputError
from posttrain.domain.jobs import Absence, Accepted, Cause, Exists, JobState, Unknown
from posttrain.domain.jobspec import JobSpec, PodGroup
from posttrain.domain.placement import ExecutorSettings
from posttrain.execution.executors import slurm
from posttrain.execution.executors.slurm import SlurmExecutor

_CLUSTER = """
import json, os, sys
from pathlib import Path

place = Path(__file__).parent
queue = place / "queue.json"
jobs = json.loads(queue.read_text()) if queue.exists() else []
given = {word.partition("=")[0].lstrip("-"): word.partition("=")[2] for word in sys.argv[1:]}
fields = {"JobID": "id", "State": "state", "RestartCnt": "restarts", "TimeUsed": "used", "exit_code": "code",
          "BatchHost": "node", "Reason": "reason", "Comment": "comment", "Name": "name"}
command = Path(sys.argv[0]).name
if (place / "refuses").exists() and command == "sbatch":
    print("sbatch: error: Batch job submission failed: " + (place / "refuses").read_text(), file=sys.stderr)
    sys.exit(1)
if command == "squeue" and (place / "fails").exists():
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
if command == "squeue":
    for job in jobs:
        if given.get("name") in (None, job["name"]):
            columns = [column.split(":", 1) for column in given["Format"].split(",")]
            print("".join(f"{job[fields[name]]}{after}" for name, after in columns))
if command == "sbatch":
    jobs.append({"id": len(jobs) + 1, "state": "PENDING", "restarts": 0, "used": "0:00", "code": 0, "node": "n/a",
                 "reason": "Priority", "comment": given["comment"], "name": given["job-name"], "words": sys.argv[1:],
                 "script": sys.stdin.read(),
                 "variables": sorted(name for name in os.environ if name[:3] in ("SQU", "SCA", "SBA", "SLU"))})
    queue.write_text(json.dumps(jobs))
    print(f"{len(jobs)};lab")
if command == "scancel":
    for job in jobs:
        job["state"] = "CANCELLED" if job["name"] == given["name"] else job["state"]
    queue.write_text(json.dumps(jobs))
"""
_LINE = """
import os, subprocess, sys
from pathlib import Path

place = Path(__file__).parent
trouble = (place / "trouble").read_text() if (place / "trouble").exists() else ""
if trouble == "refused":
    sys.exit("ssh: connect to host login port 22: Connection refused")
done = subprocess.run(["sh", "-c", sys.argv[-1]], stdin=sys.stdin, capture_output=True, text=True,
                      env={**os.environ, "PATH": f"{place}:{os.environ['PATH']}"})
sys.stderr.write(done.stderr)
last = place / "last"
before, out = last.read_text() if last.exists() else "", done.stdout
last.write_text(out)
if trouble.startswith("cut "):
    out = out[: int(float(trouble[4:]) * len(out))]
out = {"lost": "", "stale": before, "translated": out.replace("PENDING", "AUSSTEHEND")}.get(trouble, out)
sys.stdout.write(out)
"""


class Line:
    """An executor at the end of a line to a login node, and the power over the line."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "line.py").write_text(_LINE)
        for name in ("squeue", "sbatch", "scancel"):
            (place / name).write_text(f"#!{sys.executable} -S\n" + _CLUSTER)
            (place / name).chmod(stat.S_IRWXU)
        words = (sys.executable, "-S", str(place / "line.py"))
        self.executor = SlurmExecutor("slurm-a", ExecutorSettings(kind="slurm", command=words, settle=0.2))

    def trouble(self, kind: str) -> None:
        (self.place / "trouble").write_text(kind)

    def jobs(self) -> list[dict[str, object]]:
        queue = self.place / "queue.json"
        return json.loads(queue.read_text()) if queue.exists() else []  # type: ignore[no-any-return]

    def change(self, **values: object) -> None:
        """Change the only job."""
        [job] = self.jobs()
        (self.place / "queue.json").write_text(json.dumps([{**job, **values}]))


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def spec(tmp_path: Path) -> JobSpec:
    labels = {"workspace": "w1", "run": "run1", "stage": "train"}
    return JobSpec("run1-train-1", (tmp_path / "001").as_uri(), "module", labels=labels, epoch=1)


@pytest.mark.parametrize("trouble", ["lost", "stale", "cut 0.1", "cut 0.5", "cut 0.97", "refused"])
def test_a_submission_without_a_whole_answer_is_unknown_and_never_becomes_a_second_job(
    line: Line, tmp_path: Path, trouble: str
) -> None:
    job = spec(tmp_path)
    line.trouble(trouble)
    answer = line.executor.submit(job)
    assert isinstance(answer, Unknown)
    assert "\n" not in answer.detail
    with pytest.raises(InfrastructureError, match="slurm-a"):
        line.executor.observe([job])
    with pytest.raises(InfrastructureError, match="slurm-a"):
        line.executor.list("")
    line.trouble("")
    seen = line.executor.observe([job])[0]
    if trouble == "refused":
        assert (seen.state, seen.absent) == (JobState.UNKNOWN, Absence.NOT_VISIBLE_YET)
        return
    assert (seen.state, seen.detail) == (JobState.STARTING, "queued by slurm-a: Priority")
    assert line.executor.submit(job) == Exists("1")
    assert len(line.jobs()) == 1
    line.change(reason="PartitionTimeLimit")
    assert line.executor.observe([job])[0].detail == (
        "queued by slurm-a: PartitionTimeLimit; it never starts: its flavour needs a `time_limit` that the partition "
        "allows (posttrain executor add); then scancel 1"
    )


def test_a_queue_that_cannot_be_read_proves_no_absence_and_submits_nothing(line: Line, tmp_path: Path) -> None:
    (line.place / "fails").touch()
    assert isinstance(line.executor.submit(spec(tmp_path)), Unknown)
    assert line.jobs() == []
    with pytest.raises(InfrastructureError, match="Unable to contact slurm controller"):
        line.executor.observe([spec(tmp_path)])


def test_a_language_that_the_adapter_does_not_read_proves_nothing(line: Line, tmp_path: Path) -> None:
    job = spec(tmp_path)
    assert line.executor.submit(job) == Accepted("1")
    line.trouble("translated")
    seen = line.executor.observe([job])[0]
    assert (seen.state, seen.absent) == (JobState.UNKNOWN, Absence.NOT_VISIBLE_YET)
    assert "unknown state 'AUSSTEHEND'" in seen.detail


def test_any_order_of_troubles_starts_one_job(line: Line, tmp_path: Path) -> None:
    dice, job = random.Random(7), spec(tmp_path)
    for _ in range(12):
        line.trouble(dice.choice(("", "lost", "stale", "refused", f"cut {dice.random()}")))
        answer = line.executor.submit(job)
        assert isinstance(answer, Accepted | Exists | Unknown)
    line.trouble("")
    assert isinstance(line.executor.submit(job), Accepted | Exists)
    assert len(line.jobs()) == 1


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("Invalid partition name specified", InputError),
        ("Requested node configuration is not available", InputError),
        ("Requested time limit is invalid (missing or exceeds some limit)", InputError),
        ("Job submit/allocate rejected by a plugin", InfrastructureError),
    ],
)
def test_a_rejection_is_one_line_with_a_remedy(line: Line, tmp_path: Path, reason: str, error: type[Exception]) -> None:
    (line.place / "refuses").write_text(reason)
    with pytest.raises(error, match=re.escape(f"executor slurm-a rejected job run1-train-1: {reason}")) as refused:
        line.executor.submit(spec(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_controller_that_did_not_answer_sbatch_may_have_the_job(line: Line, tmp_path: Path) -> None:
    (line.place / "refuses").write_text("Socket timed out on send/recv operation")
    assert isinstance(line.executor.submit(spec(tmp_path)), Unknown)


def test_a_line_that_hangs_is_asked_once_in_a_while(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def hangs(*words: object, timeout: float, **_: object) -> None:
        calls.append(timeout)
        raise slurm.subprocess.TimeoutExpired("ssh", timeout)

    monkeypatch.setattr(slurm.subprocess, "run", hangs)
    for wanted in ("did not answer within", "does not answer; asking again within"):
        with pytest.raises(InfrastructureError, match=wanted):
            line.executor.observe([spec(tmp_path)])
    monkeypatch.setattr("posttrain.execution.ports.time.monotonic", lambda: 1e9)
    with pytest.raises(InfrastructureError, match="did not answer within 5 s"):
        line.executor.observe([spec(tmp_path)])
    assert calls == [20.0, 5.0], "a trial is short, since the thread may have jobs on other executors to decide on"


def test_jobs_of_others_and_damaged_rows_stop_no_other_job(line: Line, tmp_path: Path) -> None:
    job, now = spec(tmp_path), time.monotonic()
    line.executor.submit(job)
    [mine] = line.jobs()
    forged = {**mine, "id": 7, "name": f"x\n0|RUNNING|0|0:01|0|ada|None|{{}}|{mine['name']}"}
    odd = {**mine, "id": 8, "comment": "an admin's\nwords | here", "name": "other|name"}
    (line.place / "queue.json").write_text(json.dumps([{**mine, "state": "CANCELLED"}, forged, odd]))
    assert line.executor.observe([job])[0].state is JobState.EXITED
    (line.place / "queue.json").write_text(json.dumps([mine]))
    line.change(comment="(null)", used="INVALID", code=4294967294, state="FAILED", id=1)
    seen = line.executor.observe([job])[0]
    assert (seen.state, seen.exit_code, seen.seconds) == (JobState.EXITED, None, 0.0)
    assert line.executor.list("") == []
    assert time.monotonic() >= now


def test_variables_of_a_users_shell_hide_no_job(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_PARTITION", "SQUEUE_NAMES", "SCANCEL_PARTITION", "SBATCH_ARRAY_INX", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("SLURM_CONF", "kept")
    line.executor.submit(spec(tmp_path))
    [job] = line.jobs()
    assert job["variables"] == ["SLURM_CONF"]


def test_a_script_that_is_cut_off_starts_nothing(line: Line, tmp_path: Path) -> None:
    line.executor.submit(replace(spec(tmp_path), python=("echo", "started")))
    script = str(line.jobs()[0]["script"])
    said = [subprocess.run(["sh", "-c", script[:most]], capture_output=True, text=True, check=False).stdout
            for most in (*range(len(script) - 12, len(script) - 4, 2), len(script))]  # fmt: skip
    assert [bool(one) for one in said] == [False, False, False, False, True]


def test_what_may_succeed_later_waits(line: Line, tmp_path: Path) -> None:
    (line.place / "refuses").write_text("Required partition not available (inactive or drain)")
    with pytest.raises(CapacityError, match="rejected job run1-train-1: Required partition not available"):
        line.executor.submit(spec(tmp_path))


@pytest.mark.parametrize(
    ("row", "state", "code", "cause"),
    [
        ({"state": "COMPLETED"}, JobState.EXITED, 0, None),
        ({"state": "FAILED", "code": 3 << 8}, JobState.EXITED, 3, None),
        ({"state": "FAILED", "code": "3:0"}, JobState.EXITED, 3, None),
        ({"state": "FAILED", "code": "0:9"}, JobState.EXITED, -9, None),
        ({"state": "CANCELLED"}, JobState.EXITED, -15, None),
        ({"state": "OUT_OF_MEMORY", "code": 9}, JobState.EXITED, -9, Cause.OUT_OF_MEMORY),
        ({"state": "TIMEOUT"}, JobState.EXITED, 0, Cause.PREEMPTED),
        ({"state": "PREEMPTED"}, JobState.EXITED, 0, Cause.PREEMPTED),
        ({"state": "NODE_FAIL", "node": "ada"}, JobState.LOST, None, Cause.NODE_LOST),
        ({"state": "COMPLETING", "node": "ada"}, JobState.RUNNING, None, None),
        ({"state": "REQUEUE_HOLD"}, JobState.STARTING, None, None),
    ],
)
def test_states_of_slurm(
    line: Line, tmp_path: Path, row: dict[str, object], state: JobState, code: int | None, cause: Cause | None
) -> None:
    job = replace(spec(tmp_path), time_limit=3600.0, max_seconds=7200.0)
    line.executor.submit(job)
    line.change(used="1-02:03:04", **row)
    seen = line.executor.observe([job])[0]
    assert (seen.state, seen.exit_code, seen.cause, seen.handle) == (state, code, cause, "1")
    if state is not JobState.STARTING:
        assert seen.seconds == 86400 + 2 * 3600 + 3 * 60 + 4


def test_what_a_flavour_requests_reaches_sbatch_and_no_variable_does(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret of the driver")
    gang = (PodGroup(min=2, max=2, cpus=8, memory=3 << 30, gpus=4, kind="h100"),)
    options = {"partition": "gpu", "qos": "high", "account": "lab", "constraint": "ib&a100", "reservation": "r1"}
    job = replace(spec(tmp_path), gang=gang, options=options, time_limit=5400.0, bootstrap="bootstrap-of-the-job")
    line.executor.submit(job)
    [found] = line.jobs()
    words, script = str(found["words"]), str(found["script"])
    for wanted in ("nodes=2", "cpus-per-task=8", "mem=3072M", "gres=gpu:h100:4", "time=90", "signal=B:TERM@300",
                   "dependency=singleton", *(f"{name}={value}" for name, value in options.items())):  # fmt: skip
        assert f"'--{wanted}'" in words
    assert "bootstrap-of-the-job" in script, "the script is not on a command line, which other users see"
    assert "bootstrap-of-the-job" not in words
    assert "a secret of the driver" not in words + script
    assert "posttrain.execution.agent ray start --head" in script
    assert "RAY_AUTH_MODE,RAY_AUTH_TOKEN" in script, "srun exports the token that the cluster over the nodes requires"
    assert script.count("srun $public") == script.count("srun ") == 2


REFUSED: list[tuple[Callable[[JobSpec], JobSpec], str]] = [
    (lambda job: replace(job, image=f"r.io/a@sha256:{'0' * 64}"), "has no `container`"),
    (lambda job: replace(job, gang=(PodGroup(min=1, max=2),)), "one group of equal nodes"),
    (lambda job: replace(job, gang=(PodGroup(topology="rack"),)), "one group of equal nodes"),
]


@pytest.mark.parametrize(("change", "why"), REFUSED)
def test_what_the_adapter_does_not_provide_is_refused(
    line: Line, tmp_path: Path, change: Callable[[JobSpec], JobSpec], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        line.executor.submit(change(spec(tmp_path)))
    assert line.jobs() == []


def test_a_node_without_python_is_named_with_its_remedy(line: Line, tmp_path: Path) -> None:
    job = spec(tmp_path)
    line.executor.submit(job)
    line.change(state="FAILED", code=127 << 8, node="ada")
    assert line.executor.observe([job])[0].why == (
        "node ada: python3 cannot be run or has no Posttrain; install Posttrain there, or correct `python` of executor "
        "slurm-a: posttrain executor add"
    )
