"""A judge's host is reached where the kernel gives no namespaces too, as in most containers; little else is."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_reward_cell import FORBID, FORBIDDEN, PATIENCE

REWARD = """
import socket

def tried(family, address):
    try:
        with socket.socket(family) as made:
            made.connect(address)
        return 1.0
    except OSError:
        return 0.0

def made(act, *arguments):
    try:
        with socket.socket(*arguments) as one:
            act(one)
        return 1.0
    except OSError:
        return 0.0

def score(completion, declared, other, unix):
    return {
        "score": 1.0,
        "declared": tried(socket.AF_INET, ("localhost", declared)),
        "other": tried(socket.AF_INET, ("localhost", other)),
        "unix": tried(socket.AF_UNIX, unix),
        "multipath": made(lambda one: one.connect(("127.0.0.1", other)), socket.AF_INET, socket.SOCK_STREAM, 262),
        "fast open": made(lambda one: one.sendto(b"x", 0x20000000, ("127.0.0.1", other)), socket.AF_INET),
        "listens": made(lambda one: one.listen(), socket.AF_INET),
        "binds": made(lambda one: one.bind(("127.0.0.1", 0)), socket.AF_INET),
        "tcp": made(lambda one: one.connect(("127.0.0.1", declared)), socket.AF_INET, socket.SOCK_STREAM, 6),
        "asks for names": made(lambda one: one.connect(("127.0.0.1", 53)), socket.AF_INET, socket.SOCK_DGRAM),
        "names": float(bool(open("/etc/resolv.conf").read())),
    }
"""
# Arguments: source, where this file lies, declared port, another port, a unix socket.
JOB = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_reward_cell import call
from posttrain.sandbox.session import Provision
from posttrain.sandbox.process import open_reward

declared, other = int(sys.argv[3]), int(sys.argv[4])
notes = []
given = Provision({}, (f"localhost:{declared}",))
with open_reward(Path(sys.argv[1]), timeout=300, provision=given) as reward:
    (score,) = reward.score(call("x", declared=declared, other=other, unix=sys.argv[5]))
    print(json.dumps({"found": score.components, "notes": reward.notes}))
"""


@pytest.mark.slow
def test_the_ports_that_it_declares_and_no_others(tmp_path: Path) -> None:
    if not shutil.which("unshare"):
        pytest.skip("this machine has no unshare")
    source = tmp_path / "reward.py"
    source.write_text(REWARD)
    with (
        socket.create_server(("127.0.0.1", 0)) as declared,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(str(tmp_path / "unix"))
        unix.listen()
        ports = [str(server.getsockname()[1]) for server in (declared, other)]
        prefix = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh"]
        words = [str(source), str(Path(__file__).parent), *ports, str(tmp_path / "unix")]
        done = subprocess.run(
            [*prefix, sys.executable, "-c", JOB, *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    if done.returncode == FORBIDDEN:
        pytest.skip("this machine makes no user namespaces, so the kernel that gives none cannot be played")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    reached = {name for name, value in said["found"].items() if value}
    assert reached == {"declared", "tcp", "names", "asks for names"}
    told = "any host at the declared ports, and any host by UDP, not only the hosts that it declares"
    assert any(told in note for note in said["notes"])
