"""The history of a channel: exactly one move is live, and each says who, why, and who approved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_world import GOOD_REWARD, World, make_world
from server_bench import ServerBench, serving
from test_approvals import ONE, As, ends, user, waits  # noqa: F401  fixtures are found by their names
from test_channel_policies import better, policy_file
from test_server_pages import pages

from posttrain.app.control import control_of
from posttrain.app.workspace import open_workspace
from posttrain.domain.ids import Role


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "eve")
    made.prepare()
    return made


@pytest.mark.slow
def test_after_a_rollback_one_move_is_live_and_says_why(world: World, user: As) -> None:  # noqa: F811
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    rewarded(world, "0.94")
    first = waits(world)
    user("ann")
    world.ok("approve", first, "--reason", "numbers hold")
    user("eve")
    ends(world, first)
    rewarded(world, "1.0")
    second = waits(world)
    user("bob")
    world.ok("approve", second)
    user("eve")
    ends(world, second)
    world.ok("rollback", "prod", "--reason", "it swears")
    found = world.json("get", "prod")
    assert [(one["sequence"], one["action"], one["state"]) for one in found["history"]] == [
        (1, "promote", "superseded"),
        (2, "promote", "rolled_back"),
        (3, "rollback", "live"),
    ]
    assert [(one["actor"], one["why"]) for one in found["history"]][2] == ("user:eve", "it swears")
    assert [one["approved_by"] for one in found["history"]] == [["user:ann"], ["user:bob"], []]
    assert found["live"] == found["history"][0]["model_digest"]
    shown = world.ok("get", "prod")
    assert shown.count(" live ") == 1
    for word in ("it swears", "approved by user:ann", "approved by user:bob"):
        assert word in shown


def rewarded(world: World, quality: str) -> None:
    world.ok("asset", "add", "reward:sort", world.write("r.py", GOOD_REWARD.replace("1.0", quality)))


def released(world: World, many: int) -> Any:
    """As many moves, to and fro."""
    better(world, 0.94)
    better(world, 1.0)
    for _ in range((many - 2) // 2):
        for to, reason in (("1", "back"), ("2", "forth")):
            world.ok("rollback", "prod", "--to", to, "--reason", reason, "--lift-quarantine", "it was the traffic")
    return open_workspace(world.root)


@pytest.mark.slow
def test_moves_come_in_pages_newest_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = released(world, 8)
    with serving(workspace) as bench:
        bench.person("ann", Role.VIEWER)
        whole = control_of(workspace).history("prod")
        assert [one.entry.sequence for one in whole] == list(range(8, 0, -1))
        for limit in (1, 3, 8):
            found = [one for page in pages(bench, "/channels/prod/history", limit) for one in page["items"]]
            assert [one["entry"]["sequence"] for one in found] == list(range(8, 0, -1))
            assert [one["state"] for one in found] == [one.state for one in whole]
        for wrong in ("x", "9" * 5000):
            told = bench.ask("GET", f"/v1/projects/default/channels/prod/history?before={wrong}")
            assert told.status == 422
            assert any(words in told.json["detail"] for words in ("number of a release", "at most 4096 characters"))
    monkeypatch.setattr("posttrain.cli.runs._MOVES", 3)
    assert "5 older releases are left out" in world.ok("get", "prod")
    assert len(world.json("get", "prod")["history"]) == 8


@pytest.mark.slow
def test_the_page_of_a_channel_is_one_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from console_bench import Browser

    monkeypatch.setattr("posttrain.server.console.pages.PAGE", 3)
    workspace = released(world, 8)
    with serving(workspace) as bench:
        browser = Browser(bench)
        assert browser.log_in(bench.person("ann", Role.VIEWER)).status == 303
        numbers, place = [], "/projects/default/channels/prod"
        while place:
            page = browser.get(place).body.decode()
            numbers += [int(part.split("<")[0]) for part in page.split('<b class="tab">')[1:]]
            _, _, rest = page.partition('rel="next" href="')
            place = rest.partition('"')[0]
        assert numbers == list(range(8, 0, -1))
        assert _shows_a_policy(bench, browser, world)


def _shows_a_policy(bench: ServerBench, browser: Any, world: World) -> bool:
    world.ok("channel", "set-policy", "prod", policy_file(world, quarantine={"lift": "never"}))
    page = browser.get("/projects/default/channels/prod").body.decode()
    return all(
        word in page for word in ("dataset:heldout@1", "evaluators", "Quarantined models are never released again")
    )
