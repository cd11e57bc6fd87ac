"""Policies of release channels: from the file that somebody wrote to what is kept, and what to tell of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from posttrain.app.workspace import Workspace
from posttrain.domain.errors import InputError, meant_name, nearest
from posttrain.domain.measures import QUANTITIES, measurable
from posttrain.domain.policies import ChannelPolicy, PinnedPolicy
from posttrain.domain.principals import Role


def pinned_policy(policy: ChannelPolicy, source: Path, workspace: Workspace) -> ChannelPolicy:
    """A policy with the digest of every suite's data; relative paths in it start at its folder.

    Raises:
        InputError: data that there is not, or that is not what a written digest says.
    """
    find, suites = workspace.catalog.resolver(source.parent), {}
    for name, suite in policy.suites.items():
        try:
            found = find("dataset", suite.data)
        except InputError as error:
            raise type(error)(f"{source}: suites.{name}.data: {error}") from error
        if found.name.startswith("path:"):
            raise InputError(
                f"{source}: suites.{name}.data: must be a registered data set, got the file {suite.data}; posttrain "
                "asset add registers it, and runs may then name either"
            )
        if suite.digest not in (None, found.digest):
            raise InputError(
                f"{source}: suites.{name}.digest: must be that of {found.name}, {found.digest}, got {suite.digest}; "
                "leave it out, it is filled in"
            )
        suites[name] = suite.model_copy(update={"data": found.name, "digest": found.digest})
    return policy.model_copy(update={"suites": suites})


def policy_notes(
    pinned: PinnedPolicy, known: Iterable[str], people: Collection[str], roles: Mapping[str, Role]
) -> Iterator[str]:
    """What a policy that was just set does not do, in words.

    Args:
        known: channels that there were before.
        people: principals who have a role in the project, or did something there.
        roles: of its members; none: whoever opens the workspace may do everything.
    """
    names = list(known)
    if pinned.channel not in names:
        yield f"channel {pinned.channel} is new: nothing was released to it yet{nearest(pinned.channel, names)}"
    for person in pinned.policy.approvers:
        role = roles.get(person)
        if roles and person in people and not (role and role.covers(Role.APPROVER)):
            yield (
                f"approvers: {person} {f'is {role}' if role else 'has no role'} here and may not approve; "
                f"posttrain member set {person} {Role.APPROVER}"
            )
        if person not in people:
            hint = meant_name(person, people)
            yield f"approvers: {person} has done nothing in this project so far{hint}; check the name"
    for name, suite in pinned.policy.suites.items():
        if suite.evaluators == "any":
            yield (
                f"suites.{name}: any evaluator may judge, so a run chooses its settings and rewards; "
                "posttrain plan RUN.yaml shows the digest that pins them"
            )
    for gate in pinned.policy.gates:
        if not measurable(gate.metric):
            of, _, quantity = gate.metric.rpartition("/")
            yield (
                f"gates.{gate.name}.metric: no evaluate stage measures {quantity!r} on {of}"
                f"{nearest(quantity, QUANTITIES)}; nothing passes until some stage does"
            )
