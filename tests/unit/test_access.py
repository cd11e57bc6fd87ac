"""Who may do what, checked in front of `Control`: each verb has a role, and whoever has less is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_world import GOOD_REWARD, World, make_world
from test_channel_policies import policy_file, refused

from posttrain.api.control import VERBS, Control
from posttrain.api.verbs import Verb
from posttrain.app.control import Guard
from posttrain.app.workspace import open_workspace
from posttrain.domain.errors import AccessError
from posttrain.domain.ids import Role, lower

PEOPLE = {"vi": Role.VIEWER, "sue": Role.SUBMITTER, "app": Role.APPROVER, "root": Role.ADMIN}
As = Callable[[str], None]


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> As:
    """From now on commands are somebody else's."""

    def becomes(name: str) -> None:
        monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: name)

    return becomes


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: As) -> World:
    made = make_world(tmp_path, monkeypatch)
    user("root")
    made.prepare()
    return made


def staffed() -> None:
    workspace = open_workspace()
    with workspace.ledger.transaction("user:root") as transaction:
        for name, role in PEOPLE.items():
            transaction.set_role(f"user:{name}", role)
    workspace.close()


def test_roles_cover_those_before_them() -> None:
    order = [Role.VIEWER, Role.SUBMITTER, Role.APPROVER, Role.ADMIN]
    assert list(Role) == order
    for place, role in enumerate(order):
        assert [role.covers(other) for other in order] == [True] * (place + 1) + [False] * (3 - place)
        assert lower(role, Role.SUBMITTER) is order[min(place, 1)]


class Anything:
    """Answers every verb."""

    def ask(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        return verb.name

    def close(self) -> None:
        pass


def needed(verb: Verb[..., Any]) -> dict[str, str]:
    """A word for every parameter without a default."""
    found = verb.declared.parameters.values()
    return {one.name: "a" for one in found if one.default is one.empty and one.kind is not one.VAR_POSITIONAL}


@pytest.mark.parametrize("role", [None, *Role])
def test_whoever_has_less_than_a_verb_needs_is_refused(role: Role | None) -> None:
    control: Any = Control(Guard(Anything(), "user:ann", "default", lambda: role))
    for verb, declared in VERBS.items():
        if role is not None and role.covers(declared.needs):
            assert getattr(control, verb)(**needed(declared)) == verb
            continue
        with pytest.raises(AccessError, match=f"needs the role {declared.needs}, and user:ann") as caught:
            getattr(control, verb)("a", b=1)
        assert "\n" not in str(caught.value)
    with pytest.raises(AttributeError):
        control.workspace  # noqa: B018


def test_a_role_that_is_taken_away_is_gone_at_once() -> None:
    roles = iter([Role.ADMIN, Role.VIEWER, None])
    control = Control(Guard(Anything(), "user:ann", "default", lambda: next(roles)))
    control.remove_policy("prod")
    with pytest.raises(AccessError, match="is viewer there"):
        control.remove_policy("prod")
    with pytest.raises(AccessError, match="has no role there"):
        control.channels()


def test_a_workspace_of_ones_own_has_no_roles_and_refuses_nobody(world: World, user: As) -> None:
    user("whoever")
    world.ok("run", "run.yaml")
    world.ok("channel", "set-policy", "prod", policy_file(world))
    world.ok("ls")


@pytest.mark.slow
def test_commands_do_what_the_role_covers(world: World, user: As) -> None:
    staffed()
    user("stranger")
    for words in (("ls",), ("run", "run.yaml"), ("get", "prod")):
        assert "user:stranger has no role there; ask an admin of the project" in refused(world, *words, code=13)
    user("vi")
    world.ok("ls")
    world.ok("plan", "run.yaml")
    assert "posttrain run needs the role submitter, and user:vi is viewer there" in refused(
        world, "run", "run.yaml", code=13
    )
    assert world.json("ls")["runs"] == []
    user("sue")
    world.ok("run", "run.yaml")
    run = world.newest()
    for words in (("promote", run), ("rollback", "prod"), ("channel", "freeze", "prod")):
        assert "needs the role approver, and user:sue is submitter" in refused(world, *words, code=13)
    user("app")
    world.ok("channel", "freeze", "prod")
    world.ok("channel", "unfreeze", "prod")
    for words in (
        ("channel", "set-policy", "prod", policy_file(world)),
        ("channel", "protect", "prod"),
        ("erase", run, "--reason", "x"),
    ):
        assert "needs the role admin, and user:app is approver" in refused(world, *words, code=13)
    user("root")
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=["user:app", "user:sue"]))
    world.ok("asset", "add", "reward:sort", world.write("r.py", GOOD_REWARD.replace("1.0", "0.976")))
    assert world("run", "run.yaml", "--timeout", "600").exit_code == 12
    user("sue")  # named by the policy, and not an approver of the project
    assert "approve needs the role approver" in refused(world, "approve", world.newest(), code=13)
    user("app")
    world.ok("approve", world.newest())
    user("vi")
    world.ok("verify", "prod")
