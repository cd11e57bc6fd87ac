"""The job's own Ray cluster: reachable from this machine only, and gone with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from posttrain.engine.groups.reaper import VARIABLE

# each test owns its processes: an owner in a process of its own, so that ray starts out not imported
PROLOGUE = """
import json, os, sys, time
import psutil
from posttrain.domain.errors import *
from posttrain.engine.groups.cluster import open_cluster
from posttrain.engine.groups.reaper import VARIABLE, marked
from posttrain.engine.groups.worker_group import ResourcePool
import group_workers as gw

def say(**values):
    print(json.dumps(values), flush=True)
"""


def owner(body: str, tmp_path: Path) -> subprocess.Popen[str]:
    """A process that runs this; its lines come through a pipe, what its cluster prints lands in a file."""
    script = PROLOGUE + textwrap.dedent(body)
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with (tmp_path / "log.txt").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "HOME": str(tmp_path)},
            start_new_session=True,
        )


def told(body: str, tmp_path: Path) -> tuple[str, str]:
    """What it said, and its log; it ends by itself."""
    process = owner(body, tmp_path)
    try:
        said, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    log = (tmp_path / "log.txt").read_text()
    assert process.returncode == 0, log
    return said, log


@pytest.mark.ray
def test_a_local_cluster_keeps_to_itself(tmp_path: Path) -> None:
    said, log = told(
        """
        with open_cluster(cpus=3, store_bytes=100_000_000) as cluster:
            pool = ResourcePool(cluster.backend("main", 2))
            policy = pool.start("policy", gw.Policy)
            policy.each(gw.Policy.rank_sum, 0.0)
            policy.each(gw.complain, "a word from a rank")
            folder = open("/proc/%d/environ" % pool.processes[0].pid).read().split(VARIABLE + "=")[1].split(chr(0))[0]
            ranks = [psutil.Process(p.pid) for p in pool.processes]
            family = {*psutil.Process().children(recursive=True), *marked(folder), *ranks, psutil.Process()}
            listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == "LISTEN"]
            say(addresses=sorted(set(listening)), many=len(listening) > 4, cpus=cluster.resources()["CPU"])
            deadline = time.monotonic() + 100
            while "a word from a rank" not in open("/proc/self/fd/2").read() and time.monotonic() < deadline:
                time.sleep(0.1)  # Ray forwards the ranks' lines twice a second
            pool.close()
        say(left=len(list(marked(folder))), folder=os.path.exists(folder), mark=VARIABLE in os.environ,
            home=os.path.exists(os.path.expanduser("~/.ray")), token="RAY_AUTH_TOKEN" in os.environ)
        """,
        tmp_path,
    )
    first, last = said.splitlines()
    assert first == '{"addresses": ["127.0.0.1", "::ffff:127.0.0.1"], "many": true, "cpus": 3.0}'
    assert last == '{"left": 0, "folder": false, "mark": false, "home": false, "token": false}'
    assert "main[1]" in log
    assert "a word from a rank" in log


@pytest.mark.ray
def test_nothing_survives_a_killed_owner(tmp_path: Path) -> None:
    process = owner(
        """
        with open_cluster(cpus=2, store_bytes=100_000_000) as cluster:
            pool = ResourcePool(cluster.backend("main", 2))
            policy = pool.start("policy", gw.Policy)
            busy = policy.nonblocking.each(gw.Policy.sleep, 600.0)
            rank = psutil.Process(pool.processes[0].pid)
            folder = rank.environ()[VARIABLE]
            say(folder=folder, pids=[p.pid for p in marked(folder)])
            time.sleep(600)
        """,
        tmp_path,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(100)
    assert line, (tmp_path / "log.txt").read_text()
    folder, pids = line.split('"')[3], [int(pid) for pid in line.split("[")[1].split("]")[0].split(",")]
    assert len(pids) > 4
    deadline = time.monotonic() + 60
    while (Path(folder).exists() or any(map(alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]
    assert not Path(folder).exists()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.ray
def test_a_running_cluster_is_joined_and_left_running(tmp_path: Path) -> None:
    said, _ = told(
        '''
        import signal, subprocess
        code = """
        import os
        from posttrain.engine.groups.cluster import open_cluster
        with open_cluster(os.environ["ADDRESS"]) as cluster:
            print(cluster.local, cluster.resources()["CPU"], flush=True)
            cluster.backend("guest", 1).close()
        """.replace("\\n        ", "\\n")
        handler = signal.getsignal(signal.SIGTERM)
        with open_cluster(cpus=2, store_bytes=100_000_000) as cluster:
            say(handler=signal.getsignal(signal.SIGTERM) is handler)
            pid = cluster.backend("probe", 1).processes[0].pid
            token = psutil.Process(pid).environ()["RAY_AUTH_TOKEN"]
            env = {**os.environ, "ADDRESS": cluster.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            command = [sys.executable, "-c", code]
            guest = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=300)
            say(said=guest.stdout, code=guest.returncode, still=cluster.resources()["CPU"])
            try:
                with open_cluster():
                    pass
            except InputError as error:
                say(error=str(error))
        ''',
        tmp_path,
    )
    assert said.splitlines() == [
        '{"handler": true}',
        '{"said": "False 2.0\\n", "code": 0, "still": 2.0}',
        '{"error": "a process must be in at most one Ray cluster, but this process is already in a cluster; '
        'leave that cluster first"}',
    ]


@pytest.mark.ray
def test_a_cluster_that_cannot_be_had(tmp_path: Path) -> None:
    said, _ = told(
        """
        import socket
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        for address in (f"127.0.0.1:{port}", "nowhere"):
            try:
                with open_cluster(address, seconds=5):
                    pass
            except PosttrainError as error:
                say(kind=type(error).__name__, text=str(error).replace(str(port), "PORT"))
        import os
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # whatever the environment says
        import ray  # too early: it has settled for its own way to authenticate
        try:
            with open_cluster(cpus=1):
                say(text="opened")
        except InputError as error:
            say(text=str(error).split(";")[0])
        """,
        tmp_path,
    )
    refused, malformed, early = said.splitlines()
    assert "InfrastructureError" in refused
    assert "no Ray cluster answered at 127.0.0.1:PORT within 5 seconds" in refused
    assert "ray_address must be host:port" in malformed
    assert "limited to the loopback interface and its token, but ray was imported before" in early


@pytest.mark.slow
def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    said, _ = told(
        """
        sys.modules["ray"] = None
        try:
            with open_cluster():
                pass
        except InputError as error:
            say(text=str(error))
        """,
        tmp_path,
    )
    assert 'pip install \\"posttrain[ray]\\"' in said


def test_a_cluster_that_never_comes_up_is_ended_with_a_line(tmp_path: Path) -> None:
    """`ray.init` itself waits for ever where no worker can start, and no thread of Python runs meanwhile."""
    folder = tmp_path / "cluster"
    logs = folder / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("ModuleNotFoundError: No module named 'ray'\n\n")
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    node = subprocess.Popen(sleeper, env={**os.environ, VARIABLE: str(folder)})
    pipe = subprocess.PIPE
    reaper = subprocess.Popen(
        [sys.executable, "-m", "posttrain.engine.groups.reaper", str(folder), "0"],
        stdin=pipe,
        stderr=pipe,
        text=True,
    )
    try:
        assert node.wait(100) == -signal.SIGKILL  # and standard input was open all the time
        assert reaper.wait(100) == 0
        assert reaper.stderr is not None
        said = reaper.stderr.read()
        assert (
            said == "a local Ray cluster did not start within 0 seconds: ModuleNotFoundError: No module named 'ray'\n"
        )
        assert not folder.exists()
    finally:
        for process in (node, reaper):
            process.kill()
            process.communicate()


def test_the_reaper_ends_what_carries_the_mark_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(sleeper, env={**os.environ, VARIABLE: str(folder)})
    other = subprocess.Popen(sleeper, env={**os.environ, VARIABLE: str(tmp_path / "another")})
    reaper = subprocess.Popen(
        [sys.executable, "-m", "posttrain.engine.groups.reaper", str(folder), "600"], stdin=subprocess.PIPE
    )
    try:
        reaper.communicate(timeout=100)
        assert ours.wait(100) == -signal.SIGKILL
        assert other.poll() is None
        assert not folder.exists()
    finally:
        for process in (ours, other, reaper):
            process.kill()
            process.wait()
