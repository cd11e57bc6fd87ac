"""Runs in images, by a real podman: what they compute, what a hostile one reaches, what is left when processes die."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workbench import Workbench

from podman_image import Podman, Registry, podman_of
from serving import Served

pytestmark = pytest.mark.containers

FLOW = """
from posttrain.engine.algorithms.objectives import SupervisedObjective
from posttrain.engine.recipes.algorithm import Update, pack
from posttrain.engine.recipes.dataflow import Dataflow


class flow(Dataflow):
    def form(self, groups, seed):
        return pack(groups, lambda group: [min(range(len(group.answers)), key=lambda i: group.answers[i].generated)])

    def updates(self, step):
        return (Update("policy", SupervisedObjective),)
"""
HOSTILE = '''
import ctypes, http.client, json, os, socket
from pathlib import Path

FOUND = {}


def tried(name, act):
    """What came of it; an error's name for what cannot be done."""
    try:
        FOUND[name] = act()
    except BaseException as error:
        FOUND[name] = f"{type(error).__name__}: {error}"


def asked(path, token="", method="GET"):
    made = http.client.HTTPConnection("x", timeout=20)
    made.sock = socket.socket(socket.AF_UNIX)
    made.sock.settimeout(20)
    made.sock.connect("/run/posttrain/server.sock")
    made.request(method, path, headers={"authorization": f"Bearer {token}"} if token else {})
    return made.getresponse().status


def wrote(path):
    path.write_text("mine")
    return "written"


def attack(settings):
    here, root = Path.cwd(), Path(settings["root"])
    token = json.loads((here / "access.json").read_text())["token"]
    for name in ("server.json", "workspace.json", "ledger.db", "blobs", "cache", "runs", "server.lock"):
        tried(f"see {name}", lambda: sorted(map(str, (root / name).iterdir())) if name in ("blobs", "cache", "runs")
              else (root / name).read_bytes().decode(errors="replace")[:50])
    tried("see other attempts", lambda: sorted(map(str, here.parents[2].rglob("*.json"))))
    tried("environment", lambda: dict(os.environ))
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    tried("processes", lambda: [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids])
    lines = Path("/proc/self/status").read_text().splitlines()
    FOUND["status"] = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
    tried("interfaces", lambda: sorted(os.listdir("/sys/class/net")))
    tried("dial", lambda: socket.create_connection(("127.0.0.1", settings["port"]), 20) and "connected")
    tried("devices", lambda: sorted(os.listdir("/dev")))
    for place in ("/mine", "/usr/mine", "/etc/mine", "/run/posttrain/mine", "/proc/sys/kernel/domainname"):
        tried(f"write {place}", lambda: wrote(Path(place)))
    for place in (root, here.parent):
        tried(f"write {place}", lambda: wrote(place / "mine"))
    for name in ("spec.json", "request.json", "supervisor.json", "supervisor.lock", "job.json"):
        tried(f"read {name}", lambda: (here / name).read_text())
        tried(f"write {name}", lambda: wrote(here / name))
        tried(f"remove {name}", lambda: (here / name).unlink() or "removed")
        tried(f"replace {name}", lambda: wrote(here / "new") and (here / "new").rename(here / name) and "replaced")
    tried("link", lambda: (here / "link").symlink_to(root / "server.json") or "linked")
    tried("link elsewhere", lambda: Path("/tmp/link").symlink_to(root / "server.json") or "linked")
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *words):
        if getattr(libc, name)(*words) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return "done"

    (here / "plain").touch()
    tried("namespace of users", lambda: call("unshare", 0x10000000))
    tried("namespace of mounts", lambda: call("unshare", 0x20000))
    tried("namespace of users by clone", lambda: call("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0) and "cloned")
    tried("mount", lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None))
    tried("trace", lambda: call("ptrace", 0, 0, 0, 0))
    tried("whiteout", lambda: call("renameat2", -100, bytes(here / "plain"), -100, bytes(here / "other"), 4))
    limits = {"memory": ("memory/memory.limit_in_bytes", "memory.max"), "pids": ("pids/pids.max", "pids.max")}
    for what, files in limits.items():
        FOUND[what] = [(Path("/sys/fs/cgroup") / file).read_text().strip() for file in files
                       if (Path("/sys/fs/cgroup") / file).exists()]
    FOUND["temporary"] = os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize
    FOUND["preferred by the OOM killer"] = Path("/proc/self/oom_score_adj").read_text().strip()
    tried("pipe", lambda: os.mkfifo(here / "pipe") or "made")
    for path in ("/", "/healthz", "/readyz", "/metrics", "/v1/projects/default/whoami", "/v1/projects/default/runs",
                 "/v1/attempt/../projects/default/whoami", "/openapi.json"):
        tried(f"ask {path}", lambda: asked(path, token))
    tried("ask for another's blob", lambda: asked(f"/v1/attempt/blobs/{settings['other']}", token))
    tried("ask without a token", lambda: asked(f"/v1/attempt/blobs/{settings['own']}"))
    tried("ask for its own blob", lambda: asked(f"/v1/attempt/blobs/{settings['own']}", token))
    (here / "found.json").write_text(json.dumps(FOUND))


class flow:
    def __init__(self, config):
        attack(config.settings)
        raise ValueError("it has what it wanted")
'''
HELD = (
    FLOW
    + """
    def report(self, groups):
        import time
        from pathlib import Path

        (Path.cwd() / "held").touch()
        while not (Path.cwd() / "go").exists():
            time.sleep(0.05)
        return {}
"""
)
SECRET = "swordfish-of-the-server"
STAGE = {
    **{"kind": "dataflow", "recipe": "mine:flow", "model": "base", "data": "train", "steps": 3, "prompts_per_step": 4},
    **{"group_size": 2, "max_new_tokens": 12, "runtime": {"checkpoint_every": 1}},
}


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    made = podman_of(tmp_path_factory)
    yield made
    made.close()


@pytest.fixture
def served(empty: Workbench, podman: Podman) -> Iterator[Served]:
    empty.environment = {**podman.variables, "AWS_SECRET_ACCESS_KEY": SECRET, "HF_TOKEN": SECRET, "MINE": SECRET}
    empty.run("init", "--executor", "podman", "--job-variable", "MINE")
    empty.run("project", "allow-image", podman.image)
    made = Served(empty)
    yield made
    if made.process.poll() is None:
        made.end()
    empty.wait("the end of the driver", lambda: made.driver() is None)
    assert podman.containers() == [], "whatever happened, nothing is left"


@pytest.fixture(scope="module")
def plain(template: Workbench, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the recipe makes as a process of this machine."""
    here = template.copy(tmp_path_factory.mktemp("plain") / "bench")
    here.write("mine.py", FLOW)
    here.write("run.yaml", run_file(None))
    here.run("run", "run.yaml")
    return here.outputs(here.run_id())


def run_file(image: str | None, **settings: Any) -> dict[str, Any]:
    return {
        **{"name": "mine", "owner": "e2e", "seed": 5, "model": "model:tiny", "data": {"train": "dataset:train"}},
        **({"image": image} if image else {}),
        "stages": {"mine": {**STAGE, "settings": settings}},
        "budget": {"tokens": "5e6", "attempts": 3},
    }


def asking(served: Served, folder: Path, podman: Podman, recipe: str, **settings: Any) -> Workbench:
    ann = served.client(folder, "ann", "submitter")
    ann.write("mine.py", recipe)
    ann.write("run.yaml", run_file(podman.image, **settings))
    return ann


def test_a_recipe_from_afar_makes_in_an_image_what_it_makes_here(
    plain: dict[str, str], served: Served, podman: Podman, tmp_path: Path
) -> None:
    ann = asking(served, tmp_path / "ann", podman, FLOW)
    ran = ann.run("run", "run.yaml")
    run_id = served.host.run_id()
    assert f"run {run_id}: succeeded" in ran.out
    assert served.host.outputs(run_id) == plain
    [attempt] = served.host.attempts(run_id)
    assert attempt.executor == "podman"
    folder = served.host.root / attempt.folder
    assert json.loads((folder / "start.json").read_text())["pid"] == 1, "it ran in a container"
    assert not (folder / "cache").exists(), "what it fetched goes with it"
    assert podman.containers() == []
    served.host.check(run_id)


def test_without_a_server_it_makes_the_same(plain: dict[str, str], empty: Workbench, podman: Podman) -> None:
    """And a run whose rewards nothing confines there is refused."""
    empty.environment = podman.variables
    empty.run("init", "--executor", "podman")
    empty.write("mine.py", FLOW)
    empty.write("run.yaml", run_file(podman.image))
    empty.run("run", "run.yaml")
    run_id = empty.run_id()
    empty.check(run_id)
    assert empty.outputs(run_id) == plain
    assert podman.containers() == []
    judged = run_file(podman.image)
    judged |= {"rewards": {"length": "reward:length"}, "stages": {"mine": {**STAGE, "reward": "length"}}}
    empty.write("judged.yaml", judged)
    assert "rewards and observe must be confined" in empty.run("plan", "judged.yaml", code=2).error


@pytest.fixture
def registry(empty: Workbench, podman: Podman, tmp_path: Path) -> Iterator[Registry]:
    """One with an image of its own, which does not answer yet."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    made = Registry(podman, tmp_path / "registry", port)
    empty.environment = {**podman.variables, **made.variables}
    empty.run("init", "--executor", "podman")
    empty.write("mine.py", FLOW)
    empty.write("run.yaml", run_file(made.image))
    yield made
    made.close()


def test_a_registry_that_is_away_is_waited_for(
    plain: dict[str, str], empty: Workbench, podman: Podman, registry: Registry
) -> None:
    empty.run("run", "--detach", "run.yaml")
    run_id = empty.run_id()

    def refused() -> bool:
        logs = [empty.root / one.folder / "log.txt" for one in empty.attempts(run_id)]
        return any("connection refused; trying again in" in log.read_text() for log in logs if log.exists())

    empty.wait("a try that fails", refused)
    registry.start()
    empty.wait("the end of the run", lambda: empty.run("get", run_id, "-o", "json").json["state"] == "succeeded")
    empty.check(run_id)
    assert empty.outputs(run_id) == plain
    assert len(empty.attempts(run_id)) == 1, "an outage uses up no attempt"
    assert podman.containers() == []


@pytest.mark.parametrize("whose", ["the registry's", "another's, by a digest that is on the machine"])
def test_why_says_what_podman_said_of_an_image_that_does_not_come(
    empty: Workbench, podman: Podman, registry: Registry, whose: str
) -> None:
    """Podman would run the second: it finds a digest under any name, and a project allows names."""
    if whose != "the registry's":
        empty.write("run.yaml", run_file(f"{registry.image.split('/')[0]}/team/train@{podman.image.split('@')[1]}"))
    empty.environment["POSTTRAIN_IMAGE_FETCH_SECONDS"] = "8"  # podman itself gives up earlier, and says why
    empty.run("run", "--detach", "run.yaml")
    run_id = empty.run_id()
    empty.wait("its end", lambda: empty.run("get", run_id, "-o", "json").json["state"] == "failed")
    why = " ".join(empty.run("why", run_id).out.split())
    assert "could not be fetched within 8 s, podman reports: " in why
    assert "connection refused; check that its registry answers" in why
    assert "exit code 125" not in why


def test_what_a_hostile_recipe_reaches(served: Served, podman: Podman, tmp_path: Path) -> None:
    host = served.host
    with host.open() as workspace:
        own, other = (workspace.ledger.assets("dataset", name)[-1].digest for name in ("train", "heldout"))
    words = {"root": str(host.root), "port": served.port, "own": own, "other": other}
    ann = asking(served, tmp_path / "ann", podman, HOSTILE, **words)
    assert "it has what it wanted" in ann.run("run", "run.yaml", code=None).err
    folder = host.root / host.attempts(host.run_id())[-1].folder
    found = json.loads((folder / "found.json").read_text())
    host.check(host.run_id(), "failed")
    for what in [what for what in found if what.startswith(("see ", "dial"))]:
        if what == "see runs":
            assert found[what] == [str(folder.parents[1])], "empty folders that lead to its own"
        elif what == "see other attempts":
            assert {Path(one) for one in found[what] if folder not in Path(one).parents} == set()
        else:
            assert str(found[what]).startswith(("FileNotFound", "ConnectionRefused")), what
    assert SECRET not in json.dumps(found)
    refused = ("PermissionError", "OSError: [Errno 38]", "OSError: [Errno 22]")  # the last by glibc, of ENOSYS
    for what in (
        "namespace of users",
        "namespace of mounts",
        "namespace of users by clone",
        "mount",
        "trace",
        "whiteout",
    ):
        assert str(found[what]).startswith(refused), (what, found[what])
    box = json.loads((folder / "spec.json").read_text())["container"]
    assert {"memory", "pids"} <= set(box["limits"]), "this machine's podman sets both"
    [memory], [pids] = found["memory"], found["pids"]
    assert 0 <= box["memory"] - int(memory) < 1 << 16, "in whole pages"
    assert (pids, found["temporary"], found["preferred by the OOM killer"]) == ("16384", 4 << 30, "1000")
    assert found["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert {"PATH", "HOME", "PYTHONDONTWRITEBYTECODE"} < found["environment"].keys()
    assert not [name for name in found["environment"] if name.startswith(("POSTTRAIN_", "CONTAINERS_", "AWS_"))]
    assert all(str(folder) in one for one in found["processes"]), "it sees itself alone"
    status = found["status"]
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"], status["Seccomp"]) == (
        0,
        0,
        "1",
        "2",
    )
    assert found["interfaces"] in (["lo"], []) or "No such file" in found["interfaces"]
    assert not {"kmsg", "mem", "sda", "vda", "fuse"} & set(found["devices"])
    covered = {"spec.json", "request.json", "supervisor.json", "supervisor.lock"}
    nowhere = {f"write {name}" for name in covered} | {f"write {place}" for place in (host.root, folder.parent)}
    for what, came in found.items():
        if what.startswith(("write ", "remove ", "replace ", "link", "pipe")):
            fails = str(came).startswith(("OSError", "PermissionError", "FileNotFoundError"))
            assert fails or (what in nowhere and came == "written"), (what, came)
    assert not [one for one in (host.root, folder.parent) if (one / "mine").exists()], "it wrote into its own memory"
    assert all(json.loads((folder / name).read_text()) for name in covered - {"supervisor.lock"}), "or into nothing"
    assert not [one for one in folder.rglob("*") if one.is_symlink() or one.stat().st_mode & 0o077]
    assert not [one for one in folder.rglob("*") if not one.is_file() and not one.is_dir()], "no device, no pipe"
    for name in ("spec.json", "request.json", "supervisor.json", "supervisor.lock"):
        assert found[f"read {name}"] == "", "what supervisors go by it does not see"
    assert json.loads(found["read job.json"])["store_url"] == ""
    assert {came for what, came in found.items() if what.startswith("ask /")} == {404}
    assert found["ask for another's blob"] == 404
    assert found["ask without a token"] == 401
    assert found["ask for its own blob"] == 200
    words = (folder / "spec.json").read_text() + (folder / "log.txt").read_text()
    assert SECRET not in words


def test_whoever_dies_no_container_is_left(served: Served, podman: Podman, tmp_path: Path) -> None:
    """Server and supervisor are killed; then a person stops the run."""
    host = served.host
    ann = asking(served, tmp_path / "ann", podman, HELD)
    ann.run("run", "--detach", "run.yaml")
    run_id = host.run_id()

    def held(number: int) -> Path | None:
        found = [host.root / one.folder for one in host.attempts(run_id) if one.number == number]
        return found[0] if found and (found[0] / "held").exists() else None

    first = host.wait("an attempt in a container", lambda: held(1))
    [name] = podman.containers()
    served.kill()
    served.start()
    assert podman.containers() == [name], "a job outlives its server"
    inside = podman.pid(name)
    os.kill(json.loads((first / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    second = host.wait("another attempt", lambda: held(2))
    [other] = podman.containers()
    assert other != name
    assert not Path(f"/proc/{inside}").exists()
    lost, running = host.attempts(run_id)
    assert (lost.state, running.state) == ("lost", "launched")
    ann.run("stop", run_id)
    host.wait("the end of the run", lambda: ann.run("get", run_id, "-o", "json").json["state"] == "stopped")
    host.check(run_id, "stopped")
    assert podman.containers() == []
    assert not (second / "cache").exists()
