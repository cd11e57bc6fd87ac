"""Sinks of a served workspace: asked for over HTTP, delivered to by the server's driver, each project's its own."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_bench import ServerBench, served

from posttrain.app import driver as loop
from posttrain.app.driver import Driver
from posttrain.domain.errors import AccessError, InputError, NotFoundError, SinkError
from posttrain.domain.ids import Role
from posttrain.domain.sinks import FOR_PEOPLE, Rule
from posttrain.events.ports import SECRETS, VARIABLE, public, secrets_of
from posttrain.server.driver import OpenRuns
from sink_servers import SECRET, Receiver, receiver

WEB = {"secret_env": "POSTTRAIN_SINK_SECRET"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path) as made:
        yield made


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv(VARIABLE, "127.0.0.0/8")
    monkeypatch.setenv(SECRETS, "default/POSTTRAIN_SINK_SECRET, other/POSTTRAIN_SINK_OTHER_SECRET")
    for name in ("POSTTRAIN_SINK_SECRET", "POSTTRAIN_SINK_OTHER_SECRET"):
        monkeypatch.setenv(name, SECRET)
    with receiver() as known:
        yield known


def rebinding(monkeypatch: pytest.MonkeyPatch, address: str) -> list[str]:
    """Let names of the domain `example` mean an address; the names that were looked up."""
    known, asked = socket.getaddrinfo, []

    def found(host: Any, *words: Any, **options: Any) -> Any:
        if str(host).endswith(".example"):
            asked.append(host)
            host = address
        return known(host, *words, **options)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return asked


def tell(bench: ServerBench, project: str) -> None:
    seen = bench.workspace.seen_by("user:ann", project, "token")
    with seen.ledger.transaction("user:ann") as transaction:
        transaction.append_event("note.told", "x", {"of": project})


def test_sinks_are_looked_after_over_http(bench: ServerBench, http: Receiver) -> None:
    control = bench.control(bench.person("ann", Role.ADMIN))
    made = control.add_sink("chat", "webhook", {"url": f"{http.url}?key=hidden", **WEB}, {"run": "sort*"})
    assert (made.where, made.rules, made.actor) == (http.url, (Rule(FOR_PEOPLE, run="sort*"),), "user:ann")
    assert control.test_sink("chat") == http.url
    assert json.loads(http.posts[0].body)["test"] is True
    assert http.posts[0].signed_by(SECRET)
    assert control.pause_sink("chat").paused == "person"
    assert control.resume_sink("chat", skip=True).behind <= 1
    (found,) = control.sinks()
    assert found.name == "chat"
    control.remove_sink("chat")
    assert control.sinks() == []
    with pytest.raises(NotFoundError, match="there is no sink 'chat'"):
        control.test_sink("chat")


def test_who_may_only_look_adds_none(bench: ServerBench, http: Receiver) -> None:
    bench.person("ann", Role.ADMIN)
    eve = bench.control(bench.person("eve", Role.APPROVER))
    assert eve.sinks() == []
    for asked in (
        lambda: eve.add_sink("x", "webhook", {"url": http.url, **WEB}, {}),
        lambda: eve.test_sink("x"),
        lambda: eve.remove_sink("x"),
    ):
        with pytest.raises(AccessError, match="needs the role admin"):
            asked()


def delivering(bench: ServerBench) -> Driver:
    """The server's driver in this process, a pass at a time."""
    return Driver(bench.workspace, OpenRuns(bench.workspace, print), print, served=True)


def test_what_a_server_knows_is_not_carried_out_by_a_sink(
    bench: ServerBench, http: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hidden")
    control = bench.control(bench.person("ann", Role.ADMIN))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("webhook", {"url": http.url, "secret_env": "PGPASSWORD"}),
        ("webhook", {"url_env": "PGPASSWORD", **WEB}),
        ("email", {"to": "a@b.org", "from": "a@b.org", "host": "h", "port": 25, "user_env": "PGUSER",
                   "password_env": "PGPASSWORD"}),
        ("jsonl", {"path": str(tmp_path / ".profile")}),
    ]  # fmt: skip
    for kind, settings in refused:
        with pytest.raises(InputError) as caught:
            control.add_sink("x", kind, settings, {})
        assert "hidden" not in str(caught.value)
    assert not http.posts


def test_the_servers_driver_delivers_each_projects_events_to_its_own_sinks(bench: ServerBench, http: Receiver) -> None:
    for project in ("default", "other"):
        control = bench.control(bench.person("ann", Role.ADMIN, project), project)
        web = WEB if project == "default" else {"secret_env": "POSTTRAIN_SINK_OTHER_SECRET"}
        control.add_sink("chat", "webhook", {"url": f"{http.url}/{project}", **web}, {"on": ["all"]})
        tell(bench, project)
    driver = delivering(bench)
    told: dict[str, list[dict[str, Any]]] = {}
    both = ("default", "other")
    while not all(any(one["type"] == "note.told" for one in told.get(of, [])) for of in both):
        driver._look_after()
        posts = list(http.posts)
        told = {
            of: [json.loads(post.body) for post in posts if post.path == f"/hook/{of}"] for of in ("default", "other")
        }
    driver._leave(0.0)
    for project, events in told.items():
        assert {one["project"] for one in events} == {project}
        assert [one["audited"]["of"] for one in events if one["type"] == "note.told"] == [project]


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.0.0.1",
            "192.168.1.1",
            "172.16.5.4",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
        ),
        *("::1", "fe80::1", "fe80::1%eth0", "fd00::1", "::", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "ff02::1"),
        *("64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "fd00:ec2::254"),
    ],
)
def test_a_server_connects_to_no_private_address(address: str) -> None:
    assert "not a public address" in public({})(address)
    assert public({VARIABLE: "0.0.0.0/0,::/0"})(address) == ""


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34"])
def test_public_addresses_are_reached(address: str) -> None:
    assert public({})(address) == ""


@pytest.mark.parametrize("text", ["x", "10.0.0.1/8", "10.0.0.0/99", "::/200"])
def test_networks_must_be_some(text: str) -> None:
    with pytest.raises(InputError, match=VARIABLE):
        public({VARIABLE: text})


def test_a_webhook_reaches_nothing_that_only_the_server_reaches(
    bench: ServerBench, http: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    control = bench.control(bench.person("ann", Role.ADMIN))
    for url in (http.url, "http://169.254.169.254/latest/meta-data", "https://[::1]/x"):
        with pytest.raises(InputError, match="delivery to this address is not allowed"):
            control.add_sink("inside", "webhook", {"url": url, **WEB}, {})
    asked = rebinding(monkeypatch, "93.184.216.34")
    named = http.url.replace("127.0.0.1", "hook.example")
    control.add_sink("inside", "webhook", {"url": named, **WEB}, {"on": ["all"]})
    assert asked == ["hook.example"]
    rebinding(monkeypatch, "127.0.0.1")  # the name has another address when it is connected to
    with pytest.raises(SinkError, match=r"delivery to this address is not allowed: .* is not a public address"):
        control.test_sink("inside")
    tell(bench, "default")
    driver = delivering(bench)
    try:
        while not control.sinks()[0].failures:
            driver._look_after()
    finally:
        driver._leave(0.0)
    assert "not a public address" in control.sinks()[0].error
    assert http.posts == []


@pytest.mark.parametrize("setting", ["url", "host"])
def test_audit_5_an_address_is_refused_however_it_is_written(
    bench: ServerBench, http: Receiver, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.delenv(VARIABLE)
    control = bench.control(bench.person("ann", Role.ADMIN))
    hosts = ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", "0.0.0.0", "2852039166"]
    hosts += ["[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]", "[64:ff9b::7f00:1]"] if setting == "url" else []
    for host in hosts:
        mail = {"to": "a@b.org", "from": "a@b.org", "host": host, "port": 25}
        settings = {"url": f"http://{host}:8080/x", **WEB} if setting == "url" else mail
        with pytest.raises(InputError, match="delivery to this address is not allowed"):
            control.add_sink("inside", "webhook" if setting == "url" else "email", settings, {})
    assert control.sinks() == []


def test_audit_5_a_redirect_is_not_followed(bench: ServerBench, http: Receiver) -> None:
    control = bench.control(bench.person("ann", Role.ADMIN))
    http.answers = [302]
    control.add_sink("chat", "webhook", {"url": http.url, **WEB}, {})
    with pytest.raises(SinkError, match="redirects are not followed"):
        control.test_sink("chat")


def test_audit_5_a_secret_belongs_to_the_project_that_the_configuration_names(
    bench: ServerBench, http: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = "POSTTRAIN_SINK_BENS_PROD_KEY"  # begins as variables of the project `bens` once did
    monkeypatch.setenv(theirs, SECRET)
    monkeypatch.setenv(SECRETS, f"bens-prod/{theirs}")
    for project in ("bens", "default", "bens-prod"):
        control = bench.control(bench.person(f"admin-of-{project}", Role.ADMIN, project), project)
        settings = {"url": http.url, "secret_env": theirs}
        if project == "bens-prod":
            control.add_sink("chat", "webhook", settings, {})
            assert control.test_sink("chat") == http.url
            continue
        with pytest.raises(InputError, match=f"adds {project}/{theirs} to {SECRETS}"):
            control.add_sink("chat", "webhook", settings, {})
        assert control.sinks() == []
    monkeypatch.setenv(SECRETS, f"bens/{theirs}")  # a sink that was added before is not delivered to either
    with pytest.raises(InputError, match="must be a secret of project bens-prod"):
        control.test_sink("chat")


@pytest.mark.parametrize("text", ["POSTTRAIN_SINK_A", "a/PGPASSWORD", "A/POSTTRAIN_SINK_A", "a/POSTTRAIN_SINK_*"])
def test_audit_5_a_configuration_of_secrets_must_be_one(text: str) -> None:
    with pytest.raises(InputError, match=r"must be a comma-separated list of PROJECT/VARIABLE, got the entry"):
        secrets_of("a", {SECRETS: text})


def test_a_secret_that_is_not_there_is_said_at_once(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRETS, "default/POSTTRAIN_SINK_SECRET")
    control = bench.control(bench.person("ann", Role.ADMIN))
    made = control.add_sink("chat", "webhook", {"url": "https://example.org/x", **WEB}, {})
    assert made.lacks == "variable POSTTRAIN_SINK_SECRET is not set"
    monkeypatch.setenv("POSTTRAIN_SINK_SECRET", SECRET)
    assert control.sinks()[0].lacks == ""


def test_a_sink_that_hangs_and_is_removed_holds_up_no_driver(
    bench: ServerBench, http: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[float | None] = []
    real = threading.Thread.join

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name.startswith("posttrain-sink-"):
            joined.append(timeout)
        real(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(loop, "_SINKS", 0.0)
    http.always = "hang"
    control = bench.control(bench.person("ann", Role.ADMIN))
    control.add_sink("deaf", "webhook", {"url": http.url, **WEB}, {"on": ["all"]})
    tell(bench, "default")
    driver = delivering(bench)
    while not http.posts:
        driver._look_after()
    control.remove_sink("deaf")
    driver._stepped = 0.0
    driver._look_after()
    assert driver._deliverers == {}
    assert joined == [0.0], "its thread still waits for an answer"
    driver._leave(0.0)
