"""What commands about tokens and logins say to whoever gets a name, a role or a server wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import World, make_world
from server_bench import ServerBench, serving

from posttrain.app.workspace import open_workspace
from posttrain.client.logins import log_in, servers
from posttrain.domain.roles import Role


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "root")
    monkeypatch.setenv("POSTTRAIN_CONFIG", str(tmp_path / "config"))
    for name in ("POSTTRAIN_SERVER", "POSTTRAIN_TOKEN", "POSTTRAIN_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    made.ok("init")
    return made


@pytest.fixture
def served(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerBench]:
    """A server that commands ask."""
    with serving(open_workspace(world.root)) as bench:
        monkeypatch.setenv("POSTTRAIN_SERVER", bench.url)
        yield bench


def refused(world: World, *words: str, code: int = 2) -> str:
    result = world(*words)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return str(result.stderr)


# --- whom a token is for ----------------------------------------------------------------------------------------------


def test_nobody_is_taken_for_root_because_both_are_users(world: World) -> None:
    world.ok("member", "set", "user:root", "admin")
    said = refused(world, "token", "issue", "user:ann")
    assert "did you mean" not in said
    assert "user:ann has no role here (who has one: user:root); posttrain member set user:ann ROLE gives" in said
    world.ok("member", "set", "user:annabel", "viewer")
    assert "did you mean 'user:annabel'" in refused(world, "token", "issue", "user:annabell")


def test_a_name_without_its_kind_is_told_how_to_write_it(world: World) -> None:
    said = refused(world, "token", "issue", "ann")
    assert "must be for user:NAME or service:NAME" in said
    assert said.rstrip().endswith("got 'ann'; write user:ann")


def test_the_role_of_a_member_is_the_most_that_their_token_may(world: World) -> None:
    world.ok("member", "set", "user:ann", "approver")
    assert "at most approver of default" in world.ok("token", "issue", "user:ann")
    assert "at most viewer of default" in world.ok("token", "issue", "user:ann", "--role", "viewer")


def test_a_server_knows_the_role_of_a_member_itself(
    world: World, served: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_TOKEN", served.person("amy", Role.ADMIN))
    world.ok("member", "set", "user:ann", "approver")
    assert "at most approver of default" in world.ok("token", "issue", "user:ann")
    assert "user:bo has no role here" in refused(world, "token", "issue", "user:bo")


def test_a_token_that_opens_nothing_yet_is_told(world: World) -> None:
    said = world("token", "issue", "user:ann", "--role", "viewer", "-o", "json")
    assert json.loads(said.stdout)["actor"] == "user:ann"
    assert "user:ann has no role here; the token opens nothing before posttrain member set user:ann" in said.stderr
    world.ok("member", "set", "user:ann", "viewer")
    assert world("token", "issue", "user:ann", "--role", "viewer").stderr == ""


@pytest.mark.parametrize("words", [(), ("--role", "admin")])
def test_whoever_may_issue_no_token_is_told_so_in_the_words_that_they_typed(
    world: World, served: ServerBench, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("POSTTRAIN_TOKEN", served.person("sue", Role.SUBMITTER))
    said = refused(world, "token", "issue", "user:sue", *words, code=13)
    assert "posttrain token issue needs the role admin, and user:sue is submitter there; ask an admin of it" in said
    assert "member ls" not in said


# --- of which server one leaves ---------------------------------------------------------------------------------------


def test_logout_is_of_the_server_that_commands_ask(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in("https://one.example.org", "secret", "default")
    log_in("https://two.example.org", "secret", "default")
    monkeypatch.setenv("POSTTRAIN_SERVER", "https://two.example.org/")
    assert "the token for https://two.example.org/ is forgotten" in world.ok("logout")
    assert servers() == ["https://one.example.org"]
    assert "is forgotten" in world.ok("logout", "https://one.example.org")  # what is named goes before it
    assert servers() == []


def test_logout_without_a_server_names_those_that_there_are(world: World) -> None:
    assert "you are logged in nowhere" in refused(world, "logout")
    log_in("https://one.example.org", "secret", "default")
    assert "you are logged in to https://one.example.org" in refused(world, "logout")
    said = world.ok("logout", "https://on.example.org")
    assert "there was no token for https://on.example.org (did you mean 'https://one.example.org'?)" in said
    assert servers() == ["https://one.example.org"]


def test_a_token_that_goes_on_being_shown_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in("https://one.example.org", "secret", "default")
    monkeypatch.setenv("POSTTRAIN_TOKEN", "posttrain_x")
    said = world("logout", "https://one.example.org")
    assert said.exit_code == 0
    assert "POSTTRAIN_TOKEN is set" in said.stderr
