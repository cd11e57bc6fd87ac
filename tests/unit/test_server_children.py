"""No process of a server shows its keys to whoever reads `/proc/PID/environ` as it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from posttrain.app.workspace import init_workspace
from posttrain.server.workers import at_start, start
from posttrain.workspace.served import PLACE

KEYS = {"AWS_SECRET_ACCESS_KEY": "key-of-the-store", "PGPASSWORD": "word-of-the-ledger", "LICENSE_SERVER": "other"}
TOLD = """
import ctypes, json, os, sys
out, descriptor = sys.argv[1], int(sys.argv[2])
began = open("/proc/self/environ", "rb").read().decode(errors="replace") if os.geteuid() == 0 else ""
dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
with open(out, "w") as file:
    json.dump([began, dict(os.environ), dumpable, os.get_inheritable(descriptor)], file)
os.write(descriptor, b".")
os.read(descriptor, 1)  # until the server's end is closed
"""
LOOKS = """
import ctypes, os, sys
class Look:
    def find_spec(self, name, *_):
        if name == "posttrain.cli":
            print("dumpable", ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Look())
from posttrain.__main__ import main
main()
"""


def test_a_child_starts_without_keys_and_has_them_when_it_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "told.py").write_text(TOLD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for descriptor in (0, 3):
        out = tmp_path / f"told-{descriptor}"
        process, lifeline = start("told", [str(out), str(descriptor)], descriptor)
        with lifeline:
            lifeline.settimeout(60.0)
            assert lifeline.recv(1) == b"."
            began, environment, dumpable, inheritable = json.loads(out.read_text())
            shown = Path(f"/proc/{process.pid}/environ").read_bytes() if os.geteuid() == 0 else b""
        assert process.wait() == 0  # the server's end was closed
        assert environment == dict(os.environ)
        assert (dumpable, inheritable) == (0, descriptor == 0)
        assert not [value for value in KEYS.values() if value in began or value.encode() in shown]


def test_what_a_child_starts_with_is_named_and_no_key() -> None:
    machine = {"PATH": "/bin", "PYTHONPATH": "/x", "LD_PRELOAD": "y.so"}
    assert at_start({**machine, **KEYS, "PYTHON_TOKEN": "t", "POSTTRAIN_STORE": "s3://x"}) == machine


@pytest.mark.parametrize(
    ("words", "dumpable"),
    [
        ("serve --port 0", 0),
        ("--project x --server http://y serve", 0),
        ("--project=x serve", 0),
        ("--project serve ls", 1),
        ("get serve", 1),
    ],
)
def test_serve_is_closed_to_others_before_it_loads_anything(words: str, dumpable: int) -> None:
    said = subprocess.run([sys.executable, "-c", LOOKS, *words.split()], capture_output=True, text=True, check=False)
    assert said.stdout == f"dumpable {dumpable}\n", said.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to see what root alone may see")
def test_driver_and_workers_of_a_server_show_no_key(tmp_path: Path) -> None:
    workspace = init_workspace(tmp_path)
    root = workspace.root
    workspace.close()
    command = [sys.executable, "-m", "posttrain", "serve", "--port", "0", "--no-token"]
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env={**os.environ, **KEYS})
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith(b"serving")
        place = json.loads((root / PLACE).read_text())
        asked = urllib.request.Request(f"{place['url']}/openapi.json")
        urllib.request.urlopen(asked).read()  # by a worker
        seen: dict[str, bytes] = {}
        while len(seen) < 2:
            assert server.poll() is None
            for child in psutil.Process(server.pid).children():
                words = child.cmdline()
                shown = Path(f"/proc/{child.pid}/environ").read_bytes()
                for kind in ("posttrain.server.driver", "posttrain.server.worker"):
                    if kind in words and shown:
                        seen[kind] = shown
        for shown in seen.values():
            assert not [value for value in KEYS.values() if value.encode() in shown]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def test_what_a_child_runs_is_not_loaded_before_it_is_closed_to_others() -> None:
    loaded = "sorted(name for name in sys.modules if name.startswith('posttrain.server'))"
    script = f"import sys, posttrain.server.workers; print(*{loaded})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["posttrain.server", "posttrain.server.workers"]
