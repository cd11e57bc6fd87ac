"""What a server tells systemd, and that nobody who does not listen holds it up."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.server import service
from posttrain.server.service import Systemd


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind(str(tmp_path / "notify"))
    yield made
    made.close()


def heard(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(100, socket.MSG_DONTWAIT).decode())
        except BlockingIOError:
            return found


def test_it_says_ready_alive_and_stopping_and_no_child_inherits_the_word(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(service.time, "monotonic", lambda: clock[0])
    given = {"NOTIFY_SOCKET": str(manager.getsockname()), "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}
    environment = {**given, "PATH": "/bin"}
    told = Systemd(environment)
    assert environment == {"PATH": "/bin"}
    told.ready()
    for _ in range(70):
        told.alive()
        clock[0] += 1.0
    told.stopping()
    assert heard(manager) == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]


def test_who_does_not_listen_holds_up_nobody(manager: socket.socket) -> None:
    told = Systemd({"NOTIFY_SOCKET": str(manager.getsockname())})
    for _ in range(10_000):  # more than any queue of the kernel takes
        told.ready()
    assert heard(manager)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere/at/all"},
        {"NOTIFY_SOCKET": "@nobody-listens-here"},
        {"WATCHDOG_USEC": "nonsense"},
    ],
)
def test_without_a_manager_nothing_is_said(environment: dict[str, str]) -> None:
    told = Systemd(dict(environment))
    told.ready()
    told.alive()
    told.stopping()


def test_the_watchdog_of_another_process_is_not_ours(manager: socket.socket) -> None:
    given = {"NOTIFY_SOCKET": str(manager.getsockname()), "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    Systemd(given).alive()
    assert heard(manager) == []
