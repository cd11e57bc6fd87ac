"""What a reward must not be able to do, tried: as root, as an ordinary user, and without namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from reward_attacks import ATTACKS

PATIENCE = 300.0  # seconds for what must happen, on a machine as busy as it likes
FORBIDDEN = 77  # exit code of FORBID where it cannot take namespaces away
FORBID = """
for kind in user pid net mnt; do echo 0 > /proc/sys/user/max_${kind}_namespaces || exit 77; done
exec "$@"
"""
WITHOUT = {
    "as it is": [],
    "ordinary user": ["unshare", "--user", "--map-user", "1000", "--map-group", "1000"],
    "root without capabilities": ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"],
    "no namespaces": ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh"],
}
# root without capabilities may not map its own number into a user namespace
CONFINED = {"as it is", "ordinary user"}
NOT_HELD = {"fill_the_disk", "change_modes_of_devices"}  # without a file system of its own; the notes say so


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder, mark = tmp_path_factory.mktemp("canaries"), uuid.uuid4().hex
    for name in ("home", "workspace"):
        (folder / name).mkdir()
    (folder / "home" / "secret").write_text("hush")
    (folder / "workspace" / "ledger.db").write_text("the answers")
    (folder / "temporary").write_text("hush")
    libc, key = ctypes.CDLL(None), int(mark[:7], 16)
    memory = libc.shmget(key, 4096, 0o1666)
    shared = Path("/dev/shm", mark)
    shared.write_text("hush")
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (str(folder / "socket"), "\0" + mark):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        yield {
            "home": str(folder / "home"),
            "workspace": str(folder / "workspace"),
            "temporary": str(folder / "temporary"),
            "secret": f"secret-{mark}",
            "shm": mark,
            "sysv": key,
            "port": tcp.getsockname()[1],
            "unix": str(folder / "socket"),
            "abstract": mark,
        }
    shared.unlink()
    libc.shmctl(memory, 0, None)


@pytest.fixture(scope="module", params=list(WITHOUT))
def played(
    request: pytest.FixtureRequest, canaries: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    prefix = WITHOUT[request.param]
    if prefix and not shutil.which(prefix[0]):
        pytest.skip(f"this machine has no {prefix[0]}")
    if request.param == "root without capabilities" and os.getuid():
        pytest.skip("only root can be root without capabilities")
    order = tmp_path_factory.mktemp("order") / "canaries.json"
    order.write_text(json.dumps(canaries))
    program = [*prefix, sys.executable, str(Path(__file__).with_name("reward_attacks.py")), str(order)]
    environment = {**os.environ, "HOME": canaries["home"], "AWS_SECRET_ACCESS_KEY": canaries["secret"]}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode == FORBIDDEN:
        pytest.skip("this machine makes no user namespaces, so the kernel that gives none cannot be played")
    assert done.returncode == 0, done.stderr
    return {"mode": request.param, **json.loads(done.stdout)}


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_held_back(played: dict[str, Any], attack: str) -> None:
    held = played["results"][attack]
    if attack in NOT_HELD and not played["confined"]:
        assert any("disk" in note for note in played["notes"])
        assert any("modes" in note for note in played["notes"])
        return
    assert held == 0.0, f"{attack} as {played['mode']}: {held}"


def test_says_how_far_it_goes(played: dict[str, Any]) -> None:
    assert played["confined"] == (played["mode"] in CONFINED)
    notes = [note for note in played["notes"] if "empty /proc" not in note]  # so in many containers
    assert bool(notes) == (not played["confined"])


def test_left_nothing_behind(played: dict[str, Any], canaries: dict[str, Any]) -> None:
    assert not Path(sysconfig.get_path("purelib"), "evil.pth").exists()
    assert not Path("/usr/local/evil").exists()
    assert sorted(os.listdir(canaries["home"])) == ["secret"]


def test_there_are_many() -> None:
    assert len(ATTACKS) >= 50
