"""Approvals: releases and changes that a channel's policy leaves to people, as those people meet them."""

from __future__ import annotations

import io
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from cli_world import BAD_REWARD, GOOD_REWARD, RUN, World, make_world
from control_bench import RUN as BENCH_RUN, TRAIN_ONLY, Bench, evaluate, train
from rich.console import Console
from test_app_background import Driven, ask
from test_channel_policies import ACCURACY, POLICY, STEADY, better, policy_file, refused

from driving import drive
from posttrain.app.driver import Driver
from posttrain.app.workspace import open_workspace
from posttrain.cli.live import run_table
from posttrain.cli.screens import approval_lines
from posttrain.control import actions, channels, jobs as environments, verdicts
from posttrain.control.actions import promote, retry, stop
from posttrain.control.reconciler import Reconciler
from posttrain.domain.approvals import APPROVED, REJECTED, Action, Approval, ApprovalStatus, Terms, request_of, weigh
from posttrain.domain.errors import AccessError, ApprovalError, InputError, StaleWriteError
from posttrain.domain.ids import DRIVER, Role
from posttrain.domain.lifecycle import Reason
from posttrain.domain.policies import parse_policy
from posttrain.domain.runspec import parse_run_spec
from posttrain.domain.sinks import RUN_ENVIRONMENT
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.store.atomic import make_folder
from posttrain.store.audit import verify_rows
from posttrain.store.erasure import erase_principal, erase_subject
from posttrain.store.ledger import Ledger
from posttrain.views.logs import moves
from posttrain.views.status import RunWatcher
from posttrain.workspace.background import runs_folder

TWO = {"approvers": ["user:ann", "user:bob", "user:cy"], "approvals": 2}
ONE = {"approvers": ["user:ann", "user:bob"]}
As = Callable[[str], None]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: "eve")
    made.prepare()
    return made


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> As:
    """From now on commands are somebody else's."""

    def becomes(name: str) -> None:
        monkeypatch.setattr("posttrain.access.authenticators.system.login_name", lambda: name)

    return becomes


def waits(world: World, *words: str) -> str:
    """A run that waits for its approvals; its id."""
    result = world("run", "run.yaml", *words, "--timeout", "200")
    assert result.exit_code == 12, (result.stdout, result.stderr)
    assert re.search(r"still running after 200 s; stage release .*approv", result.stderr), result.stderr
    run = world.newest()
    release = next(stage for stage in world.json("get", run)["stages"] if stage["name"] == "release")
    assert (release["state"], release["reason"]) == ("ready", "WaitingForApproval")
    return run


def pasted(world: World, said: str) -> str:
    """Type every `posttrain approve` that a screen or an error names, as it is written there; what the last says."""
    commands = re.findall(r"posttrain (approve \S+(?: --channel \S+)?)", said)
    assert commands
    return [world.ok(*command.split()) for command in commands][-1]


def met(world: World, user: As, *names: str) -> None:
    """People whom the project knows, since they did something in it."""
    for name in names:
        user(name)
        world.ok("asset", "add", f"dataset:of-{name}", "train.jsonl")
    user("eve")


def ends(world: World, run: str, code: int = 0) -> Any:
    """Drive it to its end."""
    result = world("attach", run)
    assert result.exit_code == code, (result.stdout, result.stderr)
    return world.json("get", run)


def told(world: World, run: str) -> str:
    return " ".join(world.ok("why", run).split())


def proved() -> None:
    workspace = open_workspace()
    workspace.seal()
    verify_rows(workspace.ledger)
    workspace.close()


@pytest.mark.slow
def test_a_release_waits_for_as_many_approvals_as_the_policy_asks(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **TWO))
    assert "approve:  the release waits for 2 approvals (approvers: user:ann, user:bob, user:cy)" in world.ok(
        "plan", "run.yaml"
    )
    run = waits(world)
    said = told(world, run)
    assert "release needs 2 approvals, has none; user:ann, user:bob or user:cy may approve" in said
    assert f"posttrain approve {run}" in said
    assert world.json("get", "prod")["live"] is None
    (asked,) = world.json("get", "prod")["approval_requests"]
    assert (asked["run"], asked["missing"], asked["by"]) == (run, 2, "user:eve")
    user("ann")
    assert "has 1 (user:ann); user:bob or user:cy may approve" in world.ok("approve", run, "--reason", "numbers hold")
    world.ok("approve", run)  # said again: still one
    assert "has 1 (user:ann); user:bob or user:cy may approve" in told(world, run), "though nobody drives it"
    assert "has 1 (user:ann)" in " ".join(world.ok("ls").split())
    assert "has 1 (user:ann)" in refused(world, "promote", run, code=9)
    assert world("attach", run, "--timeout", "60").exit_code == 12
    assert "has 1 (user:ann); user:bob or user:cy may approve" in told(world, run)
    user("bob")
    assert "it has all approvals that it needs" in world.ok("approve", run[:-2])
    user("eve")
    assert ends(world, run)["state"] == "succeeded"
    assert [row["run_id"] for row in world.json("get", "prod")["history"]] == [run]
    assert world.json("get", "prod")["approval_requests"] == []
    assert "numbers hold" in told(world, run)
    assert [one["actor"] for one in world.json("get", run)["approvals"][0]["approvals"]] == ["user:ann", "user:bob"]
    assert "everything matches" in world.ok("verify", "prod")
    assert "approved by: user:ann: numbers hold; user:bob" in world.ok("lineage", "prod")
    assert "is already live on channel prod" in refused(world, "reject", run, code=2)
    proved()


def test_a_slip_in_an_approvers_name_is_told_and_refuses_nothing(world: World, user: As) -> None:
    user("annabel")
    world.ok("asset", "add", "reward:other", "reward.py")
    user("eve")
    said = world("channel", "set-policy", "prod", policy_file(world, approvers=["user:anabel", "user:eve"]))
    assert said.exit_code == 0
    warning = "approvers: user:anabel has done nothing in this project so far (did you mean 'user:annabel'?); check"
    assert warning in said.stderr
    assert "user:eve has done nothing" not in said.stderr
    said = world("channel", "set-policy", "prod", policy_file(world, approvers=["user:annabel"]))
    assert "has done nothing" not in said.stderr


def test_what_a_run_waits_for_is_told_to_whoever_attaches(world: World) -> None:
    """Also to a pipe, and though nothing changes while they look."""
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=["user:annabel", "user:bartholomew"]))
    run = waits(world)
    said = world("attach", run, "--timeout", "60").stdout
    (line,) = [line for line in said.splitlines() if " release ready" in line]
    assert "needs 1 approval, has none; user:annabel or user:bartholomew may approve" in line
    assert line.endswith(f"; next: user:annabel or user:bartholomew may run: posttrain approve {run} --channel prod")
    workspace = open_workspace()
    for width in (60, 80, 140):
        screen = Console(file=io.StringIO(), width=width, force_terminal=False)
        screen.print(run_table(RunWatcher(workspace, run).read(), width))
        shown = screen.file.getvalue()  # type: ignore[attr-defined]
        assert all(len(line) <= width for line in shown.splitlines())
        assert "user:annabel or user:bartholomew may approve" in " ".join(shown.split())
        assert f"posttrain approve {run} --channel prod" in " ".join(shown.split())
    workspace.close()


@pytest.mark.slow
def test_what_was_done_meanwhile_is_not_asked_for_again(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    user("ann")
    world.ok("approve", run)
    assert "posttrain approve" not in told(world, run), "though nobody drives it"
    assert f"next: posttrain attach {run}" in told(world, run)
    user("bob")
    world.ok("reject", run)
    user("eve")
    assert ends(world, run, 9)["reason"] == "ApprovalRejected"
    user("bob")
    world.ok("approve", run)
    user("eve")
    assert world.json("why", run)["next_action"] == f"posttrain promote {run}"
    assert told(world, run).endswith(f"next: posttrain promote {run}")
    world.ok("promote", run)
    assert world.json("why", run)["next_action"] == "posttrain get prod"
    assert [row["next_action"] for row in world.json("ls")["runs"]] == ["posttrain get prod"]


@pytest.mark.slow
def test_whoever_owns_a_run_does_not_approve_it_and_strangers_do_not(world: World, user: As) -> None:
    approvers = ["user:eve", "user:ada", "user:ann"]
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=approvers))
    run = waits(world)
    assert "must be approved by a user other than its owner, got user:eve; user:ann may approve it" in refused(
        world, "approve", run, code=13
    )
    user("ada")  # whom the run file names as its owner
    assert "got user:ada; user:ann may approve it" in refused(world, "approve", run, code=13)
    user("mallory")
    for verb in ("approve", "reject"):
        assert "only its approvers may approve or reject, got user:mallory" in refused(world, verb, run, code=13)
    assert world.json("get", run)["approvals"][0]["void"] == []
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=["user:mallory"]))
    user("eve")
    assert ends(world, run, 9)["reason"] == "PolicyNotMet"
    run = waits(world)
    user("mallory")
    world.ok("approve", run)
    assert ends(world, run)["state"] == "succeeded", "mallory may, where a policy names mallory"


@pytest.mark.slow
def test_a_policy_may_let_owners_approve(world: World) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=["user:eve"]))
    run = waits(world)
    assert "too few users other than the request's owner may approve: name more approvers in the policy" in told(
        world, run
    )
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=["user:eve"], self_approval=True))
    assert ends(world, run, 9)["reason"] == "PolicyNotMet"
    run = waits(world)
    world.ok("approve", run)
    assert ends(world, run)["state"] == "succeeded"


@pytest.mark.slow
def test_a_rejection_ends_the_release_and_is_taken_back_by_the_same_person(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    user("bob")
    world.ok("reject", run, "--reason", "it swears")
    user("ann")
    world.ok("approve", run)
    user("eve")
    found = ends(world, run, 9)
    assert (found["state"], found["reason"]) == ("rejected", "ApprovalRejected")
    assert "rejected by user:bob: it swears" in told(world, run)
    assert f"it swears; user:bob may withdraw the rejection: posttrain approve {run} --channel prod" in refused(
        world, "promote", run, code=9
    )
    user("bob")
    world.ok("approve", run, "--reason", "it does not, it quotes")
    user("eve")
    assert "release 1" in world.ok("promote", run)
    world.ok("erase", run, "--reason", "asked to")
    assert "swears" not in told(world, run)
    assert "quotes" not in told(world, run)
    proved()


def test_a_rejection_of_ones_own_run_is_taken_back_and_approves_nothing(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=["user:eve", "user:ann"]))
    run = waits(world)
    world.ok("reject", run, "--reason", "wait, a slip")
    ends(world, run, 9)
    said = refused(world, "promote", run, code=9)
    assert "rejection withdrawn; needs 1 approval, has none; user:ann may approve" in pasted(world, said)
    world.ok("approve", run)  # said again
    assert "rejection withdrawn by user:eve" in told(world, run)
    assert "does not count: it withdraws a rejection" in told(world, run)
    assert "needs 1 approval, has none; user:ann may approve" in refused(world, "promote", run, code=9)
    user("ann")
    world.ok("approve", run)
    user("eve")
    assert "release 1" in world.ok("promote", run)
    assert "approved by: user:ann " in f"{' '.join(world.ok('lineage', 'prod').split())} "
    proved()


@pytest.mark.slow
def test_what_is_live_is_neither_approved_nor_rejected_any_more(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    (asked,) = world.json("get", "prod")["approval_requests"]
    user("ann")
    world.ok("approve", run)
    user("eve")
    ends(world, run)
    user("bob")
    for verb in ("approve", "reject"):
        said = refused(world, verb, asked["request"], code=2)
        assert "is already done, so it cannot be approved or rejected; posttrain rollback prod" in said
    assert [one["rejected"] for one in world.json("get", run)["approvals"]] == [None]


def test_why_an_approval_counts_nothing_is_said(world: World, user: As) -> None:
    request = request_of(Action.RELEASE, "prod", "user:eve", 0.0, "sort-1", live=0)
    said = [Approval(request.digest, name, APPROVED, 0.0) for name in ("user:eve", "user:bob", "user:ann")]
    found = weigh(request, Terms(("user:eve", "user:ann"), 1), {"user:eve"}, said)
    assert [one.actor for one in found.given] == ["user:ann"]
    assert [why for _, why in found.void] == [
        "it is by the owner of the request",
        "user:bob is not an approver of the channel",
    ]
    lines = [line.plain for line in approval_lines([found])]
    assert lines[1].endswith("; does not count: it is by the owner of the request")
    assert lines[2].endswith("; does not count: user:bob is not an approver of the channel")


@pytest.mark.slow
def test_approvals_count_nothing_when_the_policy_is_another(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **TWO))
    run = waits(world)
    user("ann")
    world.ok("approve", run)
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    assert "the policy has changed" in told(world, run)
    user("bob")
    assert refused(world, "approve", run, code=9)
    user("eve")
    assert ends(world, run, 9)["reason"] == "PolicyNotMet"
    assert "does not count: the policy has changed" in told(world, run)
    second = waits(world)
    user("bob")
    world.ok("approve", second)
    assert ends(world, second)["state"] == "succeeded"


@pytest.mark.slow
def test_approvals_count_nothing_when_the_channel_has_moved(world: World, user: As) -> None:
    world.ship()
    world.ok("channel", "set-policy", "prod", policy_file(world, **TWO))
    world.ok("asset", "add", "reward:sort", world.write("r.py", "def score(completion, answer):\n    return 0.97\n"))
    first = waits(world)
    world.ok("asset", "add", "reward:sort", world.write("r.py", "def score(completion, answer):\n    return 0.975\n"))
    second = waits(world)
    for name in ("ann", "bob"):
        user(name)
        world.ok("approve", second)
    user("ann")
    world.ok("approve", first)
    user("eve")
    ends(world, second)
    assert "does not count: another release is live now" in told(world, first)
    user("bob")
    assert "must still point at release 1" in refused(world, "approve", first, code=9)
    user("eve")
    assert ends(world, first, 9)["reason"] == "ChannelMoved"


@pytest.mark.slow
def test_an_approval_of_one_run_is_none_of_its_repetition(world: World, user: As) -> None:
    """Two runs of one manifest have equal reports; whoever approved bob's run has not approved his own."""
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=["user:eve", "user:bob"]))
    mine = waits(world)
    user("bob")
    his = waits(world, "--again")
    gates = [world.json("get", run)["stages"][-2]["outputs"]["report"]["digest"] for run in (mine, his)]
    assert gates[0] == gates[1]
    user("eve")
    world.ok("approve", his)
    assert "has none" in refused(world, "promote", mine, code=9)
    assert "release 1" in world.ok("promote", his)


def test_a_rejection_that_comes_while_weights_are_hashed_counts(
    world: World, user: As, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    user("ann")
    world.ok("approve", run)
    hashed = verdicts.check_weights

    def meanwhile(*words: Any) -> None:
        hashed(*words)
        user("bob")
        world.ok("reject", run)

    for place in ("verdicts", "actions"):
        monkeypatch.setattr(f"posttrain.control.{place}.check_weights", meanwhile)
    assert "was rejected by user:bob" in refused(world, "promote", run, code=9)
    user("bob")
    world.ok("approve", run)
    assert ends(world, run, 9)["reason"] == "ApprovalRejected"
    assert world.json("get", "prod")["live"] is None


def test_a_frozen_channel_asks_nobody(world: World) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    world.ok("channel", "freeze", "prod")
    assert world("run", "run.yaml").exit_code == 9
    assert world.json("get", world.newest())["reason"] == "ChannelFrozen"
    assert world.json("get", "prod")["approval_requests"] == []


def test_promote_asks_for_the_same_approval(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    world.ok("channel", "freeze", "prod")
    assert world("run", "run.yaml").exit_code == 9
    run = world.newest()
    world.ok("channel", "unfreeze", "prod")
    said = refused(world, "promote", run, code=9)
    assert f"needs 1 approval, has none; user:ann or user:bob may approve: posttrain approve {run}" in said
    user("ann")
    pasted(world, world.ok("get", "prod"))
    assert "channel 'beta' is unknown (known: prod)" in refused(world, "approve", run, "--channel", "beta", code=2)
    user("eve")
    assert "release 1" in world.ok("promote", run)


def test_what_promote_names_approves_the_channel_that_it_was_asked_for(world: World, user: As) -> None:
    """Not the one that the run file names, whose release waits too."""
    document = policy_file(world, gates=[ACCURACY], **ONE)
    for channel in ("prod", "beta"):
        world.ok("channel", "set-policy", channel, document)
    run = waits(world)
    said = refused(world, "promote", run, "--channel", "beta", code=9)
    assert f"posttrain approve {run} --channel beta" in world.ok("get", "beta"), said
    user("ann")
    assert "channel beta: release of run" in pasted(world, said)
    user("eve")
    assert world("attach", run, "--timeout", "60").exit_code == 12, "prod still waits"
    assert "release 1" in world.ok("promote", run, "--channel", "beta")
    assert world.json("get", "prod")["live"] is None


def test_what_is_not_judged_cannot_be_approved(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    world.hold.add("sft")
    world("run", "run.yaml", "--timeout", "30")
    user("ann")
    assert "its gates have not been judged" in refused(world, "approve", world.newest(), code=2)
    assert "must have at least the 8 digits" in refused(world, "approve", "sha256:12", code=2)
    assert "does not exist; posttrain get CHANNEL lists" in refused(world, "approve", f"sha256:{'0' * 12}", code=2)


def test_audit_38_verify_of_a_run_finds_edited_approvals(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    user("ann")
    world.ok("approve", run)
    ends(world, run)
    world.ok("verify", run)
    for table, column, value in (
        ("approvals", "principal", "x"),
        ("approvals", "verdict", "rejected"),
        ("approval_requests", "run_id", None),
    ):
        with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db")) as ledger:
            ((before,),) = ledger.execute(f"SELECT {column} FROM {table}").fetchall()
            ledger.execute(f"UPDATE {table} SET {column} = ?", (value,))
            ledger.commit()
            said = world("verify", run)
            ledger.execute(f"UPDATE {table} SET {column} = ?", (before,))
            ledger.commit()
        assert said.exit_code == 8, column
        assert f"approval{' request' if value is None else ''} " in said.output + said.stderr
    world.ok("verify", run)


def test_a_protected_channel_changes_by_approval(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    met(world, user, "ann", "bob")
    world.ok("channel", "protect", "prod")
    user("ann")
    document = policy_file(world, "next.yaml", gates=[{**ACCURACY, "at_least": 0.95}], **ONE)
    said = refused(world, "channel", "set-policy", "prod", document, code=9)
    assert "needs 1 approval, has none; user:bob may approve: posttrain approve sha256:" in said
    (asked,) = world.json("get", "prod")["approval_requests"]
    lines = [line.split() for line in world.ok("get", "prod").splitlines() if line.strip().startswith("posttrain ")]
    assert [words[1] for words in lines] == ["channel", "approve"], "a command a line"
    assert "0.95" in world.ok(*lines[0][1:])
    assert lines[1][2] in said
    assert "must be approved by a user other than its owner" in refused(
        world, "approve", asked["request"][:20], code=13
    )
    refused(world, "channel", "remove-policy", "prod", code=9)
    refused(world, "channel", "unprotect", "prod", code=9)
    requests = world.json("get", "prod")["approval_requests"]
    assert sorted(one["action"] for one in requests) == ["remove-policy", "set-policy", "unprotect"]
    for one in requests:
        if one["action"] != "set-policy":
            assert "must propose a policy" in refused(
                world, "channel", "policy", "prod", "--asked", one["request"], code=2
            )
    user("bob")
    world.ok("approve", asked["request"][:20], "--reason", "stricter is fine")
    user("eve")
    world.ok("channel", "set-policy", "prod", document)
    assert world.json("get", "prod")["policy"] == asked["asked"]["set"]
    for one in requests:  # the channel was changed since
        user("bob")
        assert "request it again" in refused(world, "approve", one["request"], code=9)
    user("ann")
    refused(world, "channel", "unprotect", "prod", code=9)
    (asked,) = world.json("get", "prod")["approval_requests"]
    user("bob")
    world.ok("reject", asked["request"], "--reason", "no")
    user("ann")
    assert "rejected by user:bob: no" in refused(world, "channel", "unprotect", "prod", code=9)
    user("bob")
    world.ok("approve", asked["request"])
    user("ann")
    world.ok("channel", "unprotect", "prod")
    proved()


def test_a_change_that_was_approved_and_undone_needs_another_approval(world: World, user: As) -> None:
    first = policy_file(world, "first.yaml", **ONE)
    second = policy_file(world, "second.yaml", gates=[ACCURACY], **ONE)
    world.ok("channel", "set-policy", "prod", first)
    met(world, user, "ann")
    world.ok("channel", "protect", "prod")

    def changed(document: str) -> None:
        refused(world, "channel", "set-policy", "prod", document, code=9)
        (asked,) = world.json("get", "prod")["approval_requests"]
        user("ann")
        world.ok("approve", asked["request"])
        user("eve")
        world.ok("channel", "set-policy", "prod", document)

    changed(second)
    changed(first)
    assert "has none" in refused(world, "channel", "set-policy", "prod", second, code=9)


def test_a_freeze_wipes_nothing_that_was_said_of_a_change(bench: Bench) -> None:
    eve, ann, bob = (by(bench, f"user:{name}") for name in ("eve", "ann", "bob"))
    for frozen in (channels.RELEASES, ""):
        channels.freeze(ann, "prod", frozen)
    channels.protect(bench.stores, "prod", protected=True)

    def unprotects(says: str) -> None:
        with pytest.raises(ApprovalError, match=says):
            channels.protect(eve, "prod", protected=False)

    def frozen_for_a_while() -> None:
        channels.freeze(eve, "prod", channels.RELEASES)
        channels.freeze(eve, "prod", "")

    unprotects("has none")
    with bench.ledger.snapshot() as now:
        (request,) = now.approval_requests("prod")
    actions.say(bob, request, REJECTED, "never")
    actions.say(ann, request, APPROVED)
    frozen_for_a_while()
    unprotects("was rejected by user:bob: never")
    actions.say(bob, request, APPROVED)
    frozen_for_a_while()
    assert not channels.protect(eve, "prod", protected=False).protected, "what was approved still is"
    channels.protect(eve, "prod", protected=True)
    unprotects("has none")


@pytest.mark.slow
@pytest.mark.parametrize("protected", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_quarantine_is_lifted_by_approval(world: World, user: As, protected: bool) -> None:
    lift = {} if protected else {"quarantine": {"lift": "approval"}}
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE, **lift))
    for quality in (0.97, 0.98):
        world.ok(
            "asset",
            "add",
            "reward:sort",
            world.write("r.py", f"def score(completion, answer):\n    return {quality}\n"),
        )
        run = waits(world)
        user("ann")
        world.ok("approve", run)
        user("eve")
        ends(world, run)
    if protected:
        world.ok("channel", "protect", "prod")
    world.ok("rollback", "prod", "--reason", "a slip")
    lifting = ("rollback", "prod", "--to", run, "--lift-quarantine", "a slip")
    assert "--lift-quarantine REASON brings it back" in refused(world, *lifting[:4], code=9)
    assert "rollback to a quarantined model" in refused(world, *lifting, code=9)
    assert world("run", "run.yaml", "--again").exit_code == 9
    judged = world.newest()
    user("ann")
    assert "--lift-quarantine REASON requests an approval" in refused(world, "approve", judged, code=2)
    user("eve")
    assert "release of a quarantined model" in refused(world, "promote", judged, "--lift-quarantine", "a slip", code=9)
    assert len(world.json("get", "prod")["approval_requests"]) == 2
    shown = world.ok("get", "prod")
    user("bob")
    pasted(world, shown)
    user("eve")
    assert "is quarantined" in refused(world, "promote", judged, code=9)
    assert "release 4" in world.ok("promote", judged, "--lift-quarantine", "a slip")
    proved()


@pytest.mark.slow
def test_nothing_waits_where_nobody_is_named(world: World) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world))
    world.ok("run", "run.yaml")
    assert "its policy names no approvers" in refused(world, "approve", better_waiting(world), code=2)


def better_waiting(world: World) -> str:
    """A judged run that is not live."""
    world.ok("channel", "freeze", "prod")
    return better(world, 0.97)


def test_a_background_driver_keeps_a_run_that_waits_and_goes_on_when_it_is_approved(
    world: World, user: As, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    workspace, rests = open_workspace(), list[str]()
    make_folder(runs_folder(workspace.root))
    ask(workspace, run)

    def rest(driver: Driver, seconds: float) -> None:
        workspace.ledger.clock.sleep(1.0)
        rests.append(workspace.ledger.run(run).state)
        if len(rests) == 5:
            user("ann")
            world.ok("approve", run)

    monkeypatch.setattr(Driver, "_rest", rest)
    Driven(workspace).to_the_end()
    assert rests[:5] == ["running"] * 5
    assert workspace.ledger.run(run).state == "succeeded"
    workspace.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"approvals": 1}, "approvals: needs approvers, got none"),
        ({"self_approval": True}, "self_approval: needs approvers, got none"),
        ({"quarantine": {"lift": "approval"}}, "quarantine.lift: approval: needs approvers, got none"),
        ({"approvers": ["user:ann"], "approvals": 2}, "approvals: must be at most 1, the number of approvers, got 2"),
        ({"approvers": ["user:ann"], "approvals": 0}, "approvals"),
        ({"approvers": ["user:ann"], "approval": 1}, "did you mean 'approvals'?"),
    ],
)
def test_a_policy_that_nobody_could_fulfil_is_refused(world: World, changes: dict[str, Any], words: str) -> None:
    assert words in refused(world, "channel", "set-policy", "prod", policy_file(world, **changes), code=2)


def test_a_policy_without_them_has_the_digest_of_before() -> None:
    suites = {"heldout": {"data": "dataset:heldout@1", "evaluators": "any"}}
    plain = parse_policy({"gates": [ACCURACY, STEADY], "suites": suites, "approvers": ["user:ann"]}, "policy")
    assert set(plain.to_json()) == {"policy", "gates", "suites", "approvers", "quarantine"}
    assert plain.needed == 1


# --- whose it is ------------------------------------------------------------------------------------------------------


def erased(bench: Bench, name: str) -> None:
    """Somebody's name is erased, who acts again from another process."""
    erase_principal(bench.ledger, "user:root", name, "asked to")
    bench.stores = replace(bench.stores, ledger=Ledger(bench.ledger.database, bench.clock))


def said(bench: Bench, actor: str, run_id: str, verdict: str = APPROVED) -> ApprovalStatus:
    return actions.say(by(bench, actor), actions.find_release(bench.stores, run_id, None), verdict)


def test_who_submitted_a_run_does_not_approve_it_once_that_name_was_erased(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.stores = replace(bench.stores, actor="user:ann")
    run_id = planned(bench, monkeypatch)
    erased(bench, "user:ann")
    for name in ("user:ann", "user:bob"):
        with pytest.raises(AccessError, match="no one may approve it, since the name of its owner was erased; submit"):
            said(bench, name, run_id)
    bench.reconciler.tick(run_id)
    release = bench.stage(run_id, "release")
    assert (release.state, release.reason) == ("ready", Reason.WAITING_FOR_APPROVAL)
    assert "the name of the request's owner was erased; submit the run again" in release.message
    verify_rows(bench.ledger)


def test_whom_a_run_names_as_owner_does_not_approve_it_once_its_words_were_erased(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BENCH_RUN, "owner", "ann")
    bench.stores = replace(bench.stores, actor="service:ci")
    run_id = planned(bench, monkeypatch)
    stop(bench.stores, run_id)
    bench.drive(run_id)
    erase_subject(bench.ledger, "user:root", run_id, "asked to")
    with pytest.raises(AccessError, match="no one may approve it, since the name of its owner was erased; submit"):
        said(bench, "user:ann", run_id)


def test_a_rejection_counts_once_the_name_of_whoever_rejected_was_erased(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = planned(bench, monkeypatch)
    said(bench, "user:ann", run_id)
    said(bench, "user:bob", run_id, REJECTED)
    erased(bench, "user:bob")
    assert bench.drive(run_id).reason == "ApprovalRejected"
    with pytest.raises(ApprovalError, match=r"was rejected by erased:[0-9a-f]+; submit the run again"):
        promote(bench.stores, run_id, "prod")
    verify_rows(bench.ledger)


def test_an_approval_counts_nothing_while_whoever_gave_it_is_no_approver_of_the_project(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = planned(bench, monkeypatch)
    grant(bench, "user:bob", Role.APPROVER)
    said(bench, "user:bob", run_id)
    grant(bench, "user:bob", Role.SUBMITTER)
    while (tick := bench.reconciler.tick(run_id)) is not None and tick.changed:
        pass
    lacking = (
        "too few users other than the request's owner may approve: name more approvers in the policy, or give user:ann"
    )
    assert f"has none; {lacking} or user:bob the role approver" in bench.stage(run_id, "release").message
    with pytest.raises(ApprovalError, match="has none"):
        promote(bench.stores, run_id, "prod")
    bench.clock.time += 1000
    assert bench.reconciler.queue.due() == set()
    grant(bench, "user:bob", Role.APPROVER)
    assert bench.reconciler.queue.due() == {run_id}, "a role wakes who waits for it"
    assert bench.drive(run_id).state == "succeeded"
    verify_rows(bench.ledger)


def grant(bench: Bench, name: str, role: Role) -> None:
    with bench.ledger.transaction("user:root") as transaction:
        transaction.set_role(name, role)


@pytest.mark.parametrize(
    "name", ["user:ann ", "user:\u202eann", "user:a\u2028b", "user:a\u0085b", "user:", "ann", "x:ann"]
)
def test_a_name_that_reads_like_another_is_nobodys(bench: Bench, name: str) -> None:
    pinned = channels.policy_of(bench.stores, "prod")
    assert pinned is not None
    with pytest.raises(InputError, match="approvers: must be principals such as user:ann"):
        parse_policy({**pinned.policy.to_json(), "approvers": [name]}, "policy")
    with pytest.raises(InputError, match="role viewer: must be for user:NAME or service:NAME"):
        grant(bench, name, Role.VIEWER)


@pytest.mark.parametrize("owner", ["user:ann", "Ann", "service:ann", "User: ann", "\uff41\uff4e\uff4e", "a\u200dnn"])
def test_an_owner_does_not_approve_whichever_way_the_run_file_writes_the_name(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    monkeypatch.setitem(BENCH_RUN, "owner", owner)
    name = "service:ann" if owner.startswith("service") else "user:ann"
    pinned = channels.policy_of(bench.stores, "prod")
    assert pinned is not None
    named = pinned.policy.model_copy(update={"approvers": (name, "user:bob")})
    channels.set_policy(bench.stores, "prod", named)
    bench.stores = replace(bench.stores, actor="service:ci")
    run_id = planned(bench, monkeypatch)
    with pytest.raises(AccessError, match="must be approved by a user other than its owner"):
        said(bench, name, run_id)
    said(bench, "user:bob", run_id)
    assert bench.drive(run_id).state == "succeeded"


@pytest.mark.parametrize(
    "owner", ["ann ", " ann", "ann\n", "an\x07n", "\u202eann", "a\u2028b", "a\u0085b", "\ufeffann"]
)
def test_an_owner_that_reads_like_another_is_refused(owner: str) -> None:
    with pytest.raises(InputError, match="owner: must be a name without line breaks and without spaces at its ends"):
        parse_run_spec({**BENCH_RUN, "owner": owner}, "run.yaml")


@pytest.mark.parametrize(
    "owner",
    ["ada", "ada@example.org", "Ada King", "team: sorting", "山田\u3000太郎", "می\u200cخواهم", "user:ada", "a/b", "7"],
)
def test_an_owner_of_before_is_taken_as_it_is(owner: str) -> None:
    assert parse_run_spec({**BENCH_RUN, "owner": owner}, "run.yaml").owner == owner


# --- waiting costs nothing, and ends at once --------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return made_bench(tmp_path)


def made_bench(tmp_path: Path) -> Bench:
    """A bench whose channel asks ann or bob."""
    scripts: dict[str, Any] = {"sft": [train()], "evaluate": [evaluate(195)]}
    made = Bench(tmp_path, scripts | {"baseline-evaluate": [evaluate(100)]})
    digest = made.stores.blobs.put(b"rows")
    suites = {"heldout": {"data": "dataset:heldout@1", "digest": digest, "evaluators": "any"}}
    policy = {"gates": [{"name": "floor", "metric": "heldout/accuracy", "at_least": 0.6}], "suites": suites}
    channels.set_policy(made.stores, "prod", parse_policy({**policy, **ONE}, "policy"))
    return made


def by(bench: Bench, actor: str) -> Any:
    return replace(bench.stores, actor=actor)


def submitted(bench: Bench) -> str:
    """A run that was planned under the policy."""
    from posttrain.control.plan import plan_run, submit
    from posttrain.domain.canonical import digest_json
    from posttrain.domain.manifest import InputRef

    pinned = channels.policy_of(bench.stores, "prod")
    assert pinned is not None

    def resolve(kind: str, text: str) -> InputRef:
        wanted = pinned.policy.suites["heldout"].digest if text == "dataset:heldout" else None
        return InputRef(source="asset", name=f"{text}@1", digest=wanted or digest_json(text), form="file")

    spec = parse_run_spec(BENCH_RUN, "run.yaml")
    manifest = plan_run(spec, "run.yaml", resolve, bench.jobs.trainers, policy=pinned).manifest
    return submit(bench.stores, manifest, again=True).run.id


def planned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that was planned under the policy and waits."""
    run_id = submitted(bench)
    while True:
        tick = bench.reconciler.tick(run_id)
        assert tick is not None
        if not tick.changed and bench.stage(run_id, "release").reason == Reason.WAITING_FOR_APPROVAL:
            return run_id


def test_an_approval_wakes_the_run_in_its_own_transaction(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = planned(bench, monkeypatch)
    bench.clock.time += 1000
    assert bench.reconciler.queue.due() == set()
    request = actions.find_release(bench.stores, run_id, None)
    hashed: list[str] = []
    monkeypatch.setattr(verdicts, "check_weights", lambda *words: hashed.append("once"))
    actions.say(by(bench, "user:ann"), request, APPROVED)
    assert bench.reconciler.queue.due() == {run_id}
    assert bench.drive(run_id).state == "succeeded"
    assert hashed == ["once"], "weights are hashed when it is approved, not before"


def test_stop_ends_the_wait_and_a_retry_finds_what_was_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = planned(bench, monkeypatch)
    stop(bench.stores, run_id)
    assert bench.drive(run_id).state == "stopped"
    actions.say(by(bench, "user:bob"), actions.find_release(bench.stores, run_id, None), APPROVED)
    assert bench.reconciler.queue.look("run", run_id) is None, "nobody has to look at a run that has ended"
    retry(bench.stores, bench.jobs.folders, run_id)
    assert bench.drive(run_id).state == "succeeded"


@pytest.mark.parametrize("how", ["policy", "freeze", "reject"])
def test_whatever_makes_the_wait_moot_wakes_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    run_id = planned(bench, monkeypatch)
    bench.clock.time += 1000
    assert bench.reconciler.queue.due() == set()
    if how == "policy":
        channels.set_policy(bench.stores, "prod", None)
    elif how == "freeze":
        channels.freeze(bench.stores, "prod", channels.RELEASES)
    else:
        actions.say(by(bench, "user:bob"), actions.find_release(bench.stores, run_id, None), REJECTED)
    assert bench.reconciler.queue.due() == {run_id}
    ended = bench.drive(run_id)
    reasons = {"policy": "Succeeded", "freeze": "ChannelFrozen", "reject": "ApprovalRejected"}
    assert ended.reason == reasons[how]


def test_the_run_file_of_the_world_is_owned_by_somebody_else_than_who_submits() -> None:
    assert yaml.safe_load(RUN)["owner"] == "ada"
    assert "approvers" not in POLICY


# --- protected channels -----------------------------------------------------------------------------------------------


def test_audit_3_a_submitter_ships_nothing_to_a_protected_channel_without_a_policy(world: World, user: As) -> None:
    world.ok("run", "run.yaml")
    for name, role in (("eve", "admin"), ("ann", "approver"), ("ada", "approver"), ("sue", "submitter")):
        world.ok("member", "set", f"user:{name}", role)
    world.ok("channel", "protect", "prod", "--reason", "it serves people")
    user("sue")
    world.ok("asset", "add", "reward:sort", world.write("r.py", "def score(completion, answer):\n    return 0.976\n"))
    assert "approve:  the release waits for 1 approval (approvers: user:ada, user:ann, user:eve)" in world.ok(
        "plan", "run.yaml"
    )
    run = waits(world)
    assert "needs 1 approval, has none; user:ann or user:eve may approve" in told(world, run)
    assert "needs the role approver" in refused(world, "promote", run, code=13)
    assert "needs the role approver" in refused(world, "approve", run, code=13)
    user("ada")  # an approver, whom the run file names as its owner
    assert "must be approved by a user other than its owner" in refused(world, "approve", run, code=13)
    assert "needs 1 approval" in refused(world, "promote", run, code=9)
    assert len(world.json("get", "prod")["history"]) == 1
    user("ann")
    world.ok("approve", run, "--reason", "read it")
    user("sue")
    assert ends(world, run)["state"] == "succeeded"
    _, last = world.json("get", "prod")["history"]
    assert (last["actor"], last["approved_by"]) == ("user:sue", ["user:ann"])
    assert "approved by: user:ann" in world.ok("lineage", "prod")
    user("eve")
    assert "user:ada or user:ann may approve" in refused(world, "channel", "unprotect", "prod", code=9)
    proved()


def test_audit_3_a_workspace_of_one_principal_protects_nothing(world: World, user: As) -> None:
    world.ok("run", "run.yaml")
    before = world.json("get", "prod")
    said = refused(world, "channel", "protect", "prod", code=2)
    assert "cannot be protected, because no principal other than user:eve could approve" in said
    assert "posttrain member set" in said
    assert "posttrain serve" in said
    assert world.json("get", "prod") == before
    world.ok("channel", "set-policy", "prod", policy_file(world, approvers=["user:ann"]))
    again = refused(world, "channel", "protect", "prod", code=2)
    assert "no principal other than user:eve could approve" in again, "a name may be a slip"
    met(world, user, "ann")
    world.ok("channel", "protect", "prod")
    assert world.json("get", "prod")["protected"]


def test_audit_3_a_policy_lets_nobody_approve_their_own_run_on_a_protected_channel(world: World, user: As) -> None:
    approvers = {"approvers": ["user:eve", "user:ann"], "self_approval": True}
    world.ok("channel", "set-policy", "prod", policy_file(world, **approvers))
    met(world, user, "ann")
    world.ok("channel", "protect", "prod")
    run = waits(world)
    assert "must be approved by a user other than its owner" in refused(world, "approve", run, code=13)


def test_audit_3_no_promotion_is_written_that_a_protection_overtook(bench: Bench) -> None:
    channels.set_policy(bench.stores, "prod", None)
    with bench.ledger.transaction("user:eve") as transaction:
        record = transaction.snapshot.channel_record("prod")
        transaction.set_channel(record, "channel.protected", protected=True)
    with (
        pytest.raises(StaleWriteError, match="was protected since it was read"),
        bench.ledger.transaction("user:eve") as transaction,
    ):
        transaction.append_release("prod", f"sha256:{'1' * 64}", None, "promote", 0)
    assert bench.ledger.history("prod") == []


def test_audit_4_history_names_who_requested_a_release_and_never_the_account_of_the_driver(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = planned(bench, monkeypatch)  # submitted by `test`
    driver = Reconciler(by(bench, DRIVER), bench.jobs, "here")
    actions.say(by(bench, "user:ann"), actions.find_release(bench.stores, run_id, None), APPROVED)
    assert drive(driver, run_id, interval=1.0, timeout=3600).state == "succeeded"
    (move,) = moves(bench.ledger, "prod")
    assert (move.entry.actor, move.approved_by) == ("test", ("user:ann",))
    (event,) = bench.ledger.events_about("prod", "channel.promote")
    assert event.actor == DRIVER, "the log keeps who wrote it"


def test_audit_4_a_second_bare_rollback_revives_nothing_that_is_quarantined(world: World) -> None:
    world.ok("run", "run.yaml")
    second = better(world, 0.97)
    world.ok("rollback", "prod")
    assert "no other release that is not quarantined" in refused(world, "rollback", "prod", code=2)
    lifting = ("rollback", "prod", "--lift-quarantine", "it was the traffic")
    assert "--lift-quarantine must come with --to" in refused(world, *lifting, code=2)
    assert len(world.json("get", "prod")["history"]) == 3
    assert "release 4" in world.ok(*lifting, "--to", second)
    assert world.json("get", "prod")["live"] == world.json("get", second)["stages"][1]["outputs"]["model"]["digest"]
    proved()


def test_audit_27_what_an_approval_counted_stays_after_a_rollback(world: World, user: As) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    runs = []
    for number in range(2):
        user("eve")
        if number:
            world.ok("asset", "add", "reward:sort", world.write("reward.py", GOOD_REWARD.replace("1.0", "0.97")))
        runs.append(waits(world))
        user("ann")
        world.ok("approve", runs[-1], "--reason", f"look {number}")
        user("eve")
        ends(world, runs[-1])
    world.ok("rollback", "prod")
    assert world.json("get", "prod")["history"][-1]["run_id"] == runs[0], "it is live again"
    for run, reason in zip(runs, ("look 0", "look 1"), strict=True):
        (asked,) = world.json("get", run)["approvals"]
        assert (asked["outdated"], asked["missing"]) == ("", 0)
        assert reason in told(world, run)
        assert "does not count" not in told(world, run)
    proved()


def test_audit_28_lineage_and_card_name_approval_gate_values_and_packages(
    world: World, user: As, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeExecutor, "attests", True)
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(
        environments, "read_environment", partial(environments.read_environment, (str(tmp_path / "site"),))
    )
    world.ok("asset", "add", "reward:sort", world.write("reward.py", "import numpy\n\n" + GOOD_REWARD))
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    run = waits(world)
    user("ann")
    world.ok("approve", run, "--reason", "the samples are right")
    user("eve")
    ends(world, run)
    world.ok("export", "channel:prod", "out")
    texts = [" ".join(world.ok("lineage", word).split()) for word in ("prod", run)]
    texts.append(" ".join((world.root / "out" / "README.md").read_text().split()))
    for text in texts:
        assert "approved by: user:ann: the samples are right" in text
        assert f"imports: numpy {numpy.__version__}" in text
        assert "dataset dataset:train@1" in text
        (gate,) = re.findall(r"gate accuracy outcome: pass metric: heldout/accuracy estimate: ([\d.]+)", text)
        assert float(gate) == 0.98
    assert "approved by user:ann: the samples are right" in texts[-1].replace("\\", "")
    found = json.loads((world.root / "out" / "lineage.json").read_text())
    assert "the samples are right" in json.dumps(found["lineage"])
    assert {one["gate"]: one["estimate"] for one in found["gates"]}["accuracy"] == 0.98
    nodes = json.dumps(world.json("lineage", run))
    assert '"estimate": "0.98"' in nodes
    assert f'"imports": "numpy {numpy.__version__}"' in nodes


def test_audit_28_a_driver_that_died_while_it_pinned_tells_of_the_environment_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeExecutor, "attests", True)
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(
        environments, "read_environment", partial(environments.read_environment, (str(tmp_path / "site"),))
    )
    writes = environments.write_json

    def dies(path: Path, value: Any) -> None:
        monkeypatch.setattr(environments, "write_json", writes)
        raise KeyboardInterrupt

    monkeypatch.setattr(environments, "write_json", dies)
    run_id = bench.submit(**TRAIN_ONLY)
    with pytest.raises(KeyboardInterrupt):
        bench.drive(run_id)
    assert bench.drive(run_id).state == "succeeded"
    (told,) = bench.ledger.events_about(run_id, RUN_ENVIRONMENT)
    assert told.payload["digest"] == environments.ordered(bench.jobs.folders, run_id)


def test_audit_28_a_rollback_of_a_protected_channel_needs_a_reason(world: World, user: As) -> None:
    world.ok("run", "run.yaml")
    better(world, 0.97)
    world.ok("channel", "set-policy", "prod", policy_file(world, **ONE))
    met(world, user, "ann", "bob")
    world.ok("channel", "protect", "prod")
    assert "--reason is required on a protected channel, got none" in refused(world, "rollback", "prod", code=2)
    assert len(world.json("get", "prod")["history"]) == 2
    world.ok("rollback", "prod", "--reason", "answers got longer")
    assert world.json("get", "prod")["history"][-1]["why"] == "answers got longer"


def test_audit_31_an_approval_card_shows_regressions_gate_values_and_scores(world: World, user: As) -> None:
    world.write("reward.py", BAD_REWARD)
    world.ok("asset", "add", "reward:sort", "reward.py")
    text = (world.root / "run.yaml").read_text().replace("at_least: 0.9", "at_least: 0.1")
    world.write(
        "run.yaml",
        text.replace("gates:", "  was: {kind: evaluate, model: sft, suites: {heldout: {data: heldout}}}\ngates:"),
    )
    weak = [{"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.1}]
    world.ok("channel", "set-policy", "prod", policy_file(world, gates=weak, **ONE))
    run = waits(world)
    user("ann")
    for shown in (world.ok("get", "prod"), world.ok("approve", run)):
        assert "warning: stage grpo is significantly worse than stage sft" in " ".join(shown.split())
        assert shown.index("significantly worse") < shown.index("PASS") < shown.index("heldout/accuracy  (stage grpo)")
        assert "heldout/accuracy  (stage grpo)" in shown


def test_audit_31_a_policy_that_changes_during_a_run_is_said_at_once(world: World) -> None:
    world.hold.add("grpo")
    assert world("run", "run.yaml", "--timeout", "30").exit_code == 12
    run = world.newest()
    assert world.json("get", run)["warnings"] == []
    world.ok("channel", "set-policy", "prod", policy_file(world))
    (warning,) = world.json("get", run)["warnings"]
    assert warning.startswith("the policy of channel prod was changed after this run was planned")
    assert "posttrain run RUN.yaml plans a run under the current policy" in warning
    assert warning[:60] in told(world, run)
