"""Where a server sends on what its users ask: to no address of which it is not sure."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from server_bench import attempt_with_access, served
from sqlalchemy import update

from posttrain.domain.errors import InputError
from posttrain.domain.ids import Role
from posttrain.execution.processes import process_name
from posttrain.server.connections import checked_advertised, is_near, is_sure
from posttrain.server.service import Bind
from posttrain.store.ledger import Host
from posttrain.store.schema import attempts


def host(url: str, server: str = "elsewhere:1:1.00") -> Host:
    return Host("b" * 32, "b:/posttrain", url, server, "0.1.0", 1.0)


@pytest.mark.parametrize("url", ["", "http://b.example.org:8460", "https://user:word@b.example.org", "ftp://b"])
def test_an_address_that_anybody_could_have_is_none(url: str) -> None:
    assert not is_sure(host(url))
    assert not is_sure(host(url, process_name()))


def test_a_certificate_says_whose_it_is() -> None:
    assert is_sure(host("https://b.example.org:8460"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8460", "https://localhost:8460", "http://[::1]:8460"])
def test_loopback_is_anothers_unless_its_process_lives_here(url: str) -> None:
    assert is_sure(host(url, process_name()))
    here, _, started = process_name().rsplit(":", 2)
    for server in ("", "elsewhere:1:1.00", f"{here}:1:{started}", f"{here}:4194305:1.00"):
        assert not is_sure(host(url, server)), server


def test_a_process_of_another_network_is_not_near(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_near(process_name())
    spaces = iter(["net:[1]", "net:[2]"])
    monkeypatch.setattr("os.readlink", lambda path: next(spaces))
    assert not is_near(process_name())


@pytest.mark.parametrize(
    "url", ["http://b.example.org", "https://a:b@b.example.org", "https://", "x", "https://b:port"]
)
def test_what_others_could_listen_to_is_not_advertised(url: str) -> None:
    with pytest.raises(InputError, match="--advertise"):
        checked_advertised(url)
    with pytest.raises(InputError, match="--advertise"):
        Bind(advertise=url).checked()


def test_who_listens_behind_a_proxy_is_reached_where_it_says(tmp_path: Path) -> None:
    assert Bind("0.0.0.0", behind_proxy=True).advertised(8460) == ""
    assert (
        Bind("0.0.0.0", behind_proxy=True, advertise="https://a.example.org/").advertised(1) == "https://a.example.org"
    )
    assert Bind().advertised(8460) == "http://127.0.0.1:8460"
    sure = Bind("10.0.0.7", certificate=tmp_path / "c", key=tmp_path / "k")
    assert sure.advertised(8460) == "https://10.0.0.7:8460"
    (tmp_path / "c").touch()
    with pytest.raises(InputError, match=r"/k: must be a PEM file for TLS, got no file"):
        sure.checked()


def test_a_peer_that_accepts_and_says_nothing_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This server answers from the ledger once its peer had time to begin; who asks next does not wait for it."""
    monkeypatch.setattr("posttrain.server.connections._FIRST_SECONDS", 0.5)
    monkeypatch.setattr("posttrain.server.connections.LOOK_SECONDS", 3600.0)
    with served(tmp_path) as bench, socket.create_server(("127.0.0.1", 0)) as hung:
        token, peers = bench.person("ann", Role.ADMIN), bench.app.state.server.peers
        made = attempt_with_access(bench, "far")
        one = host(f"http://127.0.0.1:{hung.getsockname()[1]}", process_name())
        peers._known = {one.id: one}
        with bench.workspace.ledger.database.write(across="a test") as connection:
            connection.execute(update(attempts).values(host=one.id))
        path = f"/v1/projects/default/runs/{made.attempt.run_id}/status"
        for _ in range(2):
            answer = bench.ask("GET", path, token)
            assert (answer.status, answer.json["run"]["id"]) == (200, made.attempt.run_id)
        hung.settimeout(0)
        asked, _ = hung.accept()
        asked.close()
        with pytest.raises(BlockingIOError):
            hung.accept()
    assert [one.getMessage() for one in caplog.records if "does not answer" in one.getMessage()] != []
    assert not peers._held, "nothing of it counts any more"
