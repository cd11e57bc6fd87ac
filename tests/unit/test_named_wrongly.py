"""What commands say of a word that names no run, no release and no channel: what it is instead, and what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_world import World, make_world
from test_channel_policies import policy_file


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose channel prod serves a run; nobody changes it."""
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("shipped"), patch)
        world.ship()
    return world


@pytest.fixture
def world(shipped: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The same, from where commands are typed."""
    made = make_world(shipped.root, monkeypatch)
    made.clock = shipped.clock
    return made


def refused(world: World, *words: str) -> str:
    """The line of a command that names something wrongly."""
    result = world(*words)
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return str(result.stderr)


@pytest.mark.parametrize("verb", ["why", "logs", "attach", "stop"])
def test_a_channel_where_a_run_is_asked_for_names_the_run_that_it_serves(world: World, verb: str) -> None:
    run = world.newest()
    said = refused(world, verb, "prod")
    assert f"prod is a channel, which points at release 1, made by run {run}" in said
    assert "posttrain get prod" in said
    assert "did you mean 'prod'" not in said


@pytest.mark.parametrize("words", [("get",), ("why",), ("lineage",), ("verify",)])
def test_a_release_that_there_is_not_is_told_with_those_that_there_are(world: World, words: tuple[str, ...]) -> None:
    said = refused(world, *words, "prod@9")
    assert "channel prod has no release 9, only release 1; see posttrain get prod" in said


def test_a_release_where_a_run_is_asked_for_names_its_run(world: World) -> None:
    assert f"that is release 1 of channel prod, made by run {world.newest()}" in refused(world, "get", "prod@1")


def test_a_model_of_a_release_that_there_is_not_speaks_of_the_channel_alone(world: World) -> None:
    said = refused(world, "sample", "prod@9", "hi")
    assert "channel prod has no release 9" in said
    assert "no channel" not in said


def test_a_word_that_is_like_nothing_lists_the_newest_runs(world: World) -> None:
    assert f"(the newest: {world.newest()})" in refused(world, "why", "xyzzy")


@pytest.mark.parametrize("words", [("why",), ("get",), ("stop",), ("export", "out"), ("sample", "hi")])
def test_what_is_like_a_channel_is_no_run_that_somebody_meant(world: World, words: tuple[str, ...]) -> None:
    verb, *rest = words
    said = refused(world, verb, "prd", *rest)
    assert f"there is no run 'prd' (the newest: {world.newest()})" in said
    as_a_channel, _, as_a_run = said.partition("there is no run")
    assert ("(did you mean 'prod'?), and" in as_a_channel) == (verb in ("get", "export", "sample")), said
    assert "did you mean" not in as_a_run


def test_what_is_like_a_run_is_the_run_that_somebody_meant(world: World) -> None:
    assert "there is no run 'srt' (did you mean 'sort'?)" in refused(world, "why", "srt")


def test_where_there_is_no_run_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.ok("init")
    assert "there is no run 'sort' (there are no runs yet)" in refused(world, "why", "sort")


@pytest.mark.parametrize(
    "words",
    [
        ("approve", "RUN", "--channel", "prd"),
        ("reject", "RUN", "--channel", "prd"),
        ("promote", "RUN", "--channel", "prd"),
        ("rollback", "prd"),
        ("lineage", "channel:prd"),
        ("channel", "freeze", "prd"),
    ],
)
def test_an_unknown_channel_is_told_alike_whatever_was_asked(world: World, words: tuple[str, ...]) -> None:
    run = world.newest()
    said = refused(world, *(run if word == "RUN" else word for word in words))
    assert "channel 'prd' is unknown (did you mean 'prod'?); the first release of a run" in said


def test_a_channel_of_a_policy_alone_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    world.ok("channel", "set-policy", "staging", policy_file(world))
    assert "staging is a channel without a release" in refused(world, "why", "staging")
    assert "channel staging has no release yet" in refused(world, "lineage", "channel:staging")
    assert "unknown" not in refused(world, "rollback", "staging")
