"""Sinks as a person uses them: added, tested, told of runs beside a driver, paused, resumed, removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import BAD_REWARD, GOOD_REWARD, World, make_world

import posttrain
from posttrain.app import driver, sinks
from posttrain.app.background import Ears
from posttrain.app.workspace import Workspace
from posttrain.domain.ids import PROJECT_VARIABLE
from posttrain.store.atomic import make_folder
from posttrain.workspace.background import Request, requests_held, runs_folder, write_request
from sink_servers import SECRET, Mailbox, Receiver, mailbox, receiver

PATIENCE = 300.0


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("POSTTRAIN_SINK_SECRET", SECRET)
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture
def http() -> Iterator[Receiver]:
    with receiver() as known:
        yield known


@pytest.fixture
def smtp() -> Iterator[Mailbox]:
    with mailbox() as known:
        yield known


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver or a command delivers at its end is waited for however slow the machine is."""
    for module in (driver, sinks):
        monkeypatch.setattr(module, "LEAVE", PATIENCE)


def hook(world: World, http: Receiver, *more: str, name: str = "chat") -> str:
    return world.ok("sink", "add", name, "--webhook", http.url, "--secret-env", "POSTTRAIN_SINK_SECRET", *more)


def process(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "posttrain", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **variables})


def told(http: Receiver) -> list[dict[str, Any]]:
    assert all(post.signed_by(SECRET) for post in http.posts)
    return [json.loads(post.body) for post in http.posts]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def standing(world: World, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in world.json("sink", "ls") if one["name"] == name)
    return found


@pytest.mark.slow
def test_a_run_is_told_of_by_its_driver(world: World, http: Receiver) -> None:
    said = hook(world, http, "--on", "run-ended,gate-failed,channel-moved", "--run", "sor*")
    assert "next: posttrain sink test chat" in said
    hook(world, http, "--on", "run-ended", "--run", "other*", name="others")
    world.ok("sink", "add", "trail", "--jsonl", "trail.jsonl", "--from-start")
    world.ok("run", "run.yaml")
    run = world.newest()
    kinds = [one["type"] for one in told(http)]
    assert kinds == ["channel.promote", "run.succeeded"]
    ended = told(http)[1]
    assert ended["message"]["lines"][2] == f"Next: posttrain get {run}"
    trail = lines(world.root / "trail.jsonl")
    assert trail[0]["type"] == "ledger.created", "all that the log has"
    assert [one["sequence"] for one in trail] == list(range(1, len(trail) + 1)), "in its order, nothing twice"
    assert {one["id"] for one in told(http)} <= {one["id"] for one in trail}
    assert [(one["behind"], one["failures"]) for one in world.json("sink", "ls")] == [(0, 0)] * 3
    assert "words" not in trail[-1]
    assert run in world.ok("verify", run)


@pytest.mark.slow
def test_a_gate_that_fails_is_told_with_what_was_measured(world: World, smtp: Mailbox) -> None:
    world.write("reward.py", BAD_REWARD)
    world.ok("asset", "add", "reward:sort", "reward.py")
    server = ("--smtp", f"127.0.0.1:{smtp.port}", "--smtp-security", "none", "--from", "posttrain@example.org")
    world.ok("sink", "add", "mail", "--email", "ann@example.org", *server)
    assert world("run", "run.yaml").exit_code == 3
    run = world.newest()
    subjects = [str(mail["Subject"]) for mail in smtp.mails]
    assert subjects == [f"gates of run {run} did not pass", f"run {run} rejected"]
    said = smtp.mails[0].get_payload(decode=True).decode()  # type: ignore[union-attr]
    assert said.splitlines()[1].endswith("Measured: accuracy 0.3, no-regression 0.3."), said.splitlines()
    assert said.splitlines()[2] == f"Next: posttrain why {run}"


@pytest.mark.slow
def test_a_dead_sink_beside_a_run_touches_neither_run_nor_other_sink(
    world: World, http: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LEAVE", 0.2)
    http.always = "hang"
    hook(world, http, "--on", "all", name="deaf")
    with receiver() as well:
        hook(world, well, "--on", "run-ended", name="well")
        world.ok("run", "run.yaml")  # the deaf one never answers: this ended while it did not
        behind = standing(world, "deaf")["behind"]
        assert behind > 10
        assert http.until(lambda posts: len(posts) > 0)
        said = process("attach", world.newest()).stderr
        waits = (
            f"sink deaf: {behind} events that were not delivered wait for the next driver; posttrain sink ls shows why"
        )
        assert waits in said, said
        while standing(world, "well")["behind"]:
            world.ok("attach", world.newest())
        assert [one["type"] for one in told(well)] == ["run.succeeded"]
        assert standing(world, "deaf")["behind"] >= behind


@pytest.mark.slow
def test_what_was_not_delivered_waits_for_the_next_one(world: World, http: Receiver) -> None:
    hook(world, http, "--on", "run-ended")
    world.ok("sink", "pause", "chat")
    world.ok("run", "run.yaml")
    for words in (("sink", "resume", "chat"), ("attach", world.newest())):
        killed = process(*words, POSTTRAIN_CRASHPOINT="sink.after_send")
        assert killed.returncode == -9, "between the sink's answer and the cursor"
        assert standing(world, "chat")["behind"] > 0
    assert len(http.posts) == 2
    world.ok("attach", world.newest())
    assert len(http.posts) == 3
    assert len({post.headers["webhook-id"] for post in http.posts}) == 1, "the same event, by its id"
    assert standing(world, "chat")["behind"] == 0


@pytest.mark.slow
def test_a_background_driver_has_its_runs_told_of_too(world: World, http: Receiver) -> None:
    hook(world, http)
    run = posttrain.submit("run.yaml").id
    workspace = Workspace(world.root / ".posttrain")
    make_folder(runs_folder(workspace.root))
    with requests_held(workspace.root):
        write_request(workspace.root, Request(run, "0123abcd", str(workspace.root)))
    ears = Ears(workspace.root, "0123abcd", workspace.ledger.project, print, lambda: None)
    ears.listen()
    driver.Driver(workspace, ears, print).drive()
    workspace.close()
    assert [one["type"] for one in told(http)] == ["channel.promote", "run.succeeded"]


@pytest.mark.slow
def test_a_channel_that_a_person_moves_is_told(world: World, http: Receiver) -> None:
    world.ok("run", "run.yaml")
    world.write("reward.py", GOOD_REWARD.replace("1.0", "0.97"))
    world.ok("asset", "add", "reward:sort", "reward.py")
    world.ok("run", "run.yaml")
    hook(world, http, "--on", "channel-moved", "--channel", "prod")
    world.ok("rollback", "prod")
    (moved,) = told(http)
    assert (moved["type"], moved["subject"]) == ("channel.rollback", "prod")
    assert moved["message"]["lines"][2] == "Next: posttrain get prod"


@pytest.mark.slow
def test_sinks_of_another_project_are_delivered_to_as_well(
    world: World, http: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ok("project", "add", "other")
    monkeypatch.setenv(PROJECT_VARIABLE, "other")
    hook(world, http, "--on", "all")
    world.ok("sink", "pause", "chat")
    world.ok("sink", "resume", "chat")
    assert {one["project"] for one in told(http)} == {"other"}
    assert "sink.resumed" in [one["type"] for one in told(http)]


def test_a_test_message_says_that_it_is_one(world: World, http: Receiver, smtp: Mailbox) -> None:
    hook(world, http)
    server = ("--smtp", f"127.0.0.1:{smtp.port}", "--smtp-security", "none", "--from", "posttrain@example.org")
    world.ok("sink", "add", "mail", "--email", "ann@example.org", *server)
    world.ok("sink", "add", "trail", "--jsonl", "trail.jsonl")
    for name in ("chat", "mail", "trail"):
        assert "accepted a test message" in world.ok("sink", "test", name)
    assert [one["test"] for one in (*told(http), *lines(world.root / "trail.jsonl"))] == [True, True]
    assert smtp.mails[0]["Subject"] == "test of sink mail"
    http.always = 500
    found = world("sink", "test", "chat")
    assert (found.exit_code, found.stderr.count("\n")) == (6, 1)
    assert "answers 500" in found.stderr


def test_a_sink_is_paused_resumed_and_removed(world: World, http: Receiver) -> None:
    hook(world, http, "--on", "all")
    assert "is paused" in world.ok("sink", "pause", "chat")
    assert standing(world, "chat")["paused"] == "person"
    assert "posttrain sink resume chat" in world.ok("sink", "ls")
    world.ok("asset", "add", "dataset:more", "train.jsonl")
    assert standing(world, "chat")["behind"] > 0
    assert "nothing waits" in world.ok("sink", "resume", "chat", "--skip") or standing(world, "chat")["behind"] < 3
    world.ok("sink", "remove", "chat")
    assert "there is no sink" in world.ok("sink", "ls")
    assert "there is no sink 'chat'" in world("sink", "test", "chat").stderr
    hook(world, http)
    assert standing(world, "chat")["failures"] == 0


def test_no_secret_is_recorded(world: World, http: Receiver, tmp_path: Path) -> None:
    hook(world, http)
    (tmp_path / "key").write_text(SECRET)
    world.ok("sink", "add", "two", "--webhook", f"{http.url}?q=hidden", "--secret-file", str(tmp_path / "key"))
    world.ok("sink", "test", "two")
    for path in (world.root / ".posttrain").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert "hidden" not in world.ok("sink", "ls")
    assert http.posts[0].path == "/hook?q=hidden"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("x",), "needs exactly one of"),
        (("x", "--jsonl", "a.jsonl", "--webhook", "http://h/"), "got webhook and jsonl"),
        (("x", "--webhook", "http://h/"), "must have either --secret-env VAR or"),
        (("x", "--webhook", "ftp://h/", "--secret-env", "POSTTRAIN_SINK_S"), "URL must be http"),
        (("x", "--jsonl", "a.jsonl", "--secret-env", "POSTTRAIN_SINK_S"), "takes no secret env"),
        (("x", "--email", "a@b.org", "--from", "p@b.org", "--smtp", "h"), "--smtp must be HOST:PORT"),
        (("x", "--email", "a@b.org", "--smtp", "h:25"), "--from must be one address"),
        (("X Y", "--jsonl", "a.jsonl"), "name must be"),
        (("x", "--jsonl", "nowhere/a.jsonl"), "does not exist; create it"),
        (("x", "--jsonl", "a.jsonl", "--on", "run-eneded"), "did you mean 'run-ended'"),
    ],
)
def test_what_makes_no_sink_is_refused_in_a_line(world: World, words: tuple[str, ...], said: str) -> None:
    found = world("sink", "add", *words)
    assert found.exit_code == 2
    assert said in found.stderr
    assert found.stderr.count("\n") == 1
    assert world.json("sink", "ls") == []


def test_a_name_that_is_taken_is_refused(world: World) -> None:
    world.ok("sink", "add", "x", "--jsonl", "a.jsonl")
    again = world("sink", "add", "x", "--jsonl", "b.jsonl")
    assert again.exit_code == 9
    assert "sink x exists; posttrain sink remove x" in again.stderr


@pytest.mark.slow
def test_a_driver_that_ends_by_an_error_delivers_why(world: World) -> None:
    """The run is set aside, which is what its sinks are there for."""
    told = world.root / "events.jsonl"
    world.ok("sink", "add", "file", "--jsonl", str(told))
    workspace = Workspace(world.root / ".posttrain")
    run = posttrain.submit("run.yaml", workspace=workspace)
    digest = workspace.ledger.run(run.id).manifest_digest.partition(":")[2]
    workspace.close()
    [blob] = [
        one for one in (world.root / ".posttrain" / "blobs").rglob("*") if one.is_file() and digest[4:] in str(one)
    ]
    blob.unlink()
    assert world("attach", run.id).exit_code != 0
    kinds = [json.loads(line)["type"] for line in told.read_text().splitlines()]
    assert "run.set_aside" in kinds
    world.ok("sink", "remove", "file")
    workspace = Workspace(world.root / ".posttrain")
    assert not workspace.ledger.pending_events(), "others hear that it is gone"
    workspace.close()


def test_who_interrupts_the_wait_for_sinks_gets_the_answer_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has ended, and the channel was moved: only the delivery is given up."""
    world.ok("sink", "add", "file", "--jsonl", str(world.root / "events.jsonl"))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.events.bus.Deliverer.finish", interrupted)
    assert json.loads(world("run", "run.yaml", "-o", "json").stdout)["state"] == "succeeded"
    assert "prod" in world.ok("promote", world.newest(), "--channel", "prod")
