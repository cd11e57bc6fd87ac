"""What commands about tokens and logins say to whoever gets a name, a role or a server wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cli_world import BAD_REWARD, World, make_world
from server_bench import ServerBench, serving

from posttrain.app.workspace import open_workspace
from posttrain.cli.console import Asked, as_typed, say
from posttrain.cli.main import app
from posttrain.client.logins import log_in, login_of, servers
from posttrain.domain.ids import Role


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "root")
    monkeypatch.setattr("posttrain.cli.console._HERE", Asked())
    monkeypatch.setenv("POSTTRAIN_CONFIG", str(tmp_path / "config"))
    for name in ("POSTTRAIN_SERVER", "POSTTRAIN_TOKEN", "POSTTRAIN_PROJECT"):
        monkeypatch.setenv(name, "")  # so that what a command's options leave behind is taken back
        monkeypatch.delenv(name)
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
    assert "user:ann has no role here (with a role: user:root); assign one: posttrain member set user:ann ROLE" in said
    world.ok("member", "set", "user:annabel", "viewer")
    assert "did you mean 'user:annabel'" in refused(world, "token", "issue", "user:annabell")


def test_a_name_without_its_kind_is_told_how_to_write_it(world: World) -> None:
    said = refused(world, "token", "issue", "ann")
    assert "must be for user:NAME or service:NAME" in said
    assert said.rstrip().endswith("got 'ann'; write user:ann")


def test_the_role_of_a_member_is_the_most_that_their_token_may(world: World) -> None:
    world.ok("member", "set", "user:ann", "approver")
    assert "with at most the role approver of default" in world.ok("token", "issue", "user:ann")
    assert "with at most the role viewer of default" in world.ok("token", "issue", "user:ann", "--role", "viewer")


def test_a_server_knows_the_role_of_a_member_itself(
    world: World, served: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_TOKEN", served.person("amy", Role.ADMIN))
    world.ok("member", "set", "user:ann", "approver")
    assert "with at most the role approver of default" in world.ok("token", "issue", "user:ann")
    assert "user:bo has no role here" in refused(world, "token", "issue", "user:bo")


def test_a_token_that_opens_nothing_yet_is_told(world: World) -> None:
    said = world("token", "issue", "user:ann", "--role", "viewer", "-o", "json")
    assert json.loads(said.stdout)["actor"] == "user:ann"
    assert "user:ann has no role here; the token grants nothing until posttrain member set user:ann" in said.stderr
    world.ok("member", "set", "user:ann", "viewer")
    assert world("token", "issue", "user:ann", "--role", "viewer").stderr == ""


@pytest.mark.parametrize("words", [(), ("--role", "admin")])
def test_whoever_may_issue_no_token_is_told_so_in_the_words_that_they_typed(
    world: World, served: ServerBench, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("POSTTRAIN_TOKEN", served.person("sue", Role.SUBMITTER))
    said = refused(world, "token", "issue", "user:sue", *words, code=13)
    assert (
        "posttrain token issue needs the role admin, and user:sue is submitter there; ask an admin of the project"
        in said
    )
    assert "member ls" not in said


# --- of which server one leaves ---------------------------------------------------------------------------------------


def test_logout_is_of_the_server_that_commands_ask(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in("https://one.example.org", "secret", "default")
    log_in("https://two.example.org", "secret", "default")
    monkeypatch.setenv("POSTTRAIN_SERVER", "https://two.example.org/")
    assert "the token of default for https://two.example.org/ was deleted" in world.ok("logout")
    assert servers() == ["https://one.example.org"]
    assert "was deleted" in world.ok("logout", "https://one.example.org")  # what is named goes before it
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


# --- of which project a token is --------------------------------------------------------------------------------------


def logged(world: World, token: str, *words: str) -> Any:
    """`login` by somebody who types this token."""
    return world.runner.invoke(app, list(words), input=token + "\n")


@pytest.fixture
def two(served: ServerBench) -> ServerBench:
    """Ann has a role and a token in `default` and in `research`; Eve is of `default` alone."""
    for project in ("research", "default"):
        served.tokens[project] = served.person("ann", Role.SUBMITTER, project)
    served.person("ben", Role.ADMIN, "hidden")
    served.person("eve", Role.VIEWER)
    return served


@pytest.mark.parametrize("words", [("login",), ("--project", "research", "login"), ("login", "--project", "research")])
def test_a_login_is_to_the_project_of_the_token(world: World, two: ServerBench, words: tuple[str, ...]) -> None:
    said = logged(world, two.tokens["research"], *words, two.url)
    assert f"logged in to {two.url} as user:ann, submitter of research" in said.stdout, said.stderr
    assert "of research (identified by token)" in world.ok("whoami")
    assert "research  submitter" in world.ok("project", "ls")


def test_the_variable_names_the_project_of_a_login(
    world: World, two: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_PROJECT", "research")
    assert "submitter of research" in logged(world, two.tokens["research"], "login", two.url).stdout
    said = logged(world, two.tokens["default"], "login", two.url)
    assert said.exit_code == 13
    assert (
        f"this token is for default, not for 'research'; use a token for that project, or posttrain login {two.url}"
        in (said.stderr)
    )
    assert "--project default" in said.stderr
    assert list(login_of(two.url).tokens) == ["research"]  # what is refused is not kept


def test_a_token_of_another_project_says_so_to_whoever_has_a_role_there(
    world: World, two: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_TOKEN", two.tokens["default"])
    assert "also submitter of research" in world.ok("whoami")
    said = refused(world, "--project", "research", "ls", code=13)
    assert "this token is for default; log in with a token for research: posttrain login" in said
    assert "--project research" in said
    told = [refused(world, "--project", one, "ls").replace(one, "X") for one in ("hidden", "absent")]
    assert told[0] == told[1]  # who has no role there is told nothing of it
    assert "there is no project 'X' that you may see: this token is for default" in told[0]


def test_logins_are_kept_by_project(world: World, two: ServerBench) -> None:
    assert logged(world, two.tokens["default"], "login", two.url).exit_code == 0
    said = logged(world, two.tokens["research"], "login", two.url, "--project", "research").stdout
    assert "also logged in there to default; commands without --project use research" in said
    assert "of research (" in world.ok("whoami")
    assert "of default (" in world.ok("--project", "default", "whoami")
    said = world.ok("logout", two.url, "--project", "default")
    assert f"the token of default for {two.url} was deleted" in said
    assert "you are still logged in there to research" in said
    assert "of research (" in world.ok("whoami")
    assert "there was no token of default" in world.ok("--project", "default", "logout")
    assert list(login_of(two.url).tokens) == ["research"]


def test_who_left_the_project_that_was_asked_says_which_of_the_others(world: World) -> None:
    url = "https://one.example.org"
    for name in ("a", "b", "c"):
        log_in(url, f"secret-{name}", name)
    assert f"the token of c for {url} was deleted" in world.ok("logout", url)
    assert "you are logged in to a and b there; name one project: --project NAME" in refused(world, "logout", url)
    assert "you are logged in to a and b there" in refused(world, "--server", url, "ls")
    assert login_of(url).tokens == {"a": "secret-a", "b": "secret-b"}


def test_a_file_of_the_release_before_is_read_and_stays_private(world: World, two: ServerBench) -> None:
    place = world.root / "config" / "servers.json"
    if not place.parent.exists():
        place.parent.mkdir()
    place.write_text(json.dumps({two.url: {"token": two.tokens["research"], "project": "research"}}))
    place.chmod(0o640)
    assert "contains tokens, and other users can read it; run chmod 600" in world("whoami").stderr
    place.chmod(0o600)
    assert "of research (" in world.ok("whoami")
    assert logged(world, two.tokens["default"], "login", two.url).exit_code == 0
    assert dict(login_of(two.url).tokens) == {name: two.tokens[name] for name in ("research", "default")}
    assert place.stat().st_mode & 0o077 == 0


def test_a_token_says_what_it_is_of(two: ServerBench) -> None:
    assert two.ask("GET", "/v1/token", two.tokens["research"]).json == {
        "principal": "user:ann",
        "projects": {"research": "admin"},
    }
    assert two.ask("GET", "/v1/token", None).status == 401
    interface = two.ask("GET", "/openapi.json", None).json
    told = interface["paths"]["/v1/token"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(two.ask("GET", "/v1/token").json, told)


# --- what commands are said to do next --------------------------------------------------------------------------------


def test_a_command_that_is_said_asks_the_project_that_was_asked(
    world: World, served: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.person("ann", Role.ADMIN, "research")
    monkeypatch.setenv("POSTTRAIN_TOKEN", served.tokens["ann"])
    of = ("--project", "research")
    said = world.ok(*of, "member", "set", "user:bo", "submitter")
    assert said.rstrip().endswith(": posttrain --project research token issue user:bo")
    said = world(*of, "token", "issue", "user:eve", "--role", "viewer").stderr
    assert "until posttrain --project research member set user:eve" in said
    assert "posttrain --project research member set user:cy ROLE" in refused(world, *of, "token", "issue", "user:cy")
    assert "`posttrain --project research ls` shows the runs" in refused(world, *of, "why", "nosuch")
    assert "next: posttrain --project research run RUN.yaml" in world.ok(*of, "ls")
    at = ("--server", served.url, *of)
    assert f"next: posttrain --server {served.url} --project research run RUN.yaml" in world.ok(*at, "ls")
    monkeypatch.setenv("POSTTRAIN_PROJECT", "research")
    assert "next: posttrain run RUN.yaml" in world.ok("ls"), "who set the variable need not be told"


def test_a_table_and_a_login_say_commands_of_the_project(world: World) -> None:
    world.prepare()
    world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD))
    assert world("run", "run.yaml").exit_code == 3
    run = world.newest()
    command = world.json("why", run)["next_action"]
    assert command.startswith("posttrain ")
    for verb in ("ls", "get", "why"):
        said = world.ok("--project", "default", verb, *([run] if verb != "ls" else []))
        assert "posttrain --project default " in said, verb
        assert "posttrain " not in said.replace("posttrain --project default ", ""), verb
    assert world.json("--project", "default", "why", run)["next_action"] == command  # a program has its own words
    assert command in world.ok("why", run)
    said = world("--project", "research", "--server", "https://one.example.org", "ls").stderr
    assert "posttrain login https://one.example.org --project research" in said
    ours = as_typed("posttrain ls; posttrain itself; posttrain login URL")
    at = "--server https://one.example.org --project research"
    assert ours == f"posttrain {at} ls; posttrain itself; posttrain login URL"


def test_words_of_others_stay_as_they_are(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.ok("--project", "default", "ls")
    say("what a model answered: posttrain ls", quoted=True)
    say("posttrain ls")
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "what a model answered: posttrain ls",
        "posttrain --project default ls",
    ]
