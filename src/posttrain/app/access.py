"""Projects, their members and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.access.authenticators.token import issue, refuse_unnamed, rotate
from posttrain.api.assets import Issued, Whoami
from posttrain.api.control import Control
from posttrain.api.verbs import answers
from posttrain.domain.errors import InputError, NotFoundError, meant, meant_name, nearest
from posttrain.domain.ids import Role, is_project
from posttrain.domain.jobspec import image_rule
from posttrain.domain.records import CALLS, DEFAULT_PROJECT, Token

if TYPE_CHECKING:
    from posttrain.app.workspace import Workspace

_DAY = 86400.0  # seconds


@answers(Control.whoami)
def whoami(workspace: Workspace) -> Whoami:
    ledger, actor = workspace.ledger, workspace.actor
    given = {project: str(role) for project, role in ledger.roles_of(actor).items()}
    return Whoami(actor, ledger.auth, ledger.project, given.get(ledger.project), given)


@answers(Control.add_project)
def add_project(workspace: Workspace, name: str) -> Whoami:
    if workspace.ledger.project != DEFAULT_PROJECT:
        raise InputError(
            f"a project can be created only in the project {DEFAULT_PROJECT}, by an admin, but the project is "
            f"{workspace.ledger.project}; use --project {DEFAULT_PROJECT}"
        )
    if not is_project(name):
        raise InputError(f"project {name[:80]!r}: must be 1-63 of a-z 0-9 - and begin with a letter or digit")
    made = workspace.seen_by(workspace.actor, name, workspace.ledger.auth)
    with made.ledger.transaction(made.actor) as transaction:
        transaction.add_project()
    return whoami(workspace)


@answers(Control.allow_image)
def allow_image(workspace: Workspace, image: str) -> list[str] | None:
    rule = image_rule(image)
    with workspace.ledger.transaction(workspace.actor) as transaction:
        transaction.allow_image(rule)
    return workspace.ledger.images()


@answers(Control.remove_image)
def remove_image(workspace: Workspace, image: str) -> list[str] | None:
    with workspace.ledger.transaction(workspace.actor) as transaction:
        transaction.remove_image(image)
    return workspace.ledger.images()


@answers(Control.set_member)
def set_member(workspace: Workspace, principal: str, role: str | None) -> dict[str, str]:
    with workspace.ledger.transaction(workspace.actor) as transaction:
        transaction.set_role(principal, None if role is None else _role(role))
    return {name: str(role) for name, role in workspace.ledger.roles().items()}


@answers(Control.issue_token)
def issue_token(
    workspace: Workspace, principal: str, role: str | None, days: float, channel: str | None = None
) -> Issued:
    refuse_unnamed(principal)
    ledger, known = workspace.ledger, workspace.ledger.roles()
    if channel is not None:
        if role is not None:
            raise InputError(f"token: a key for channel {channel} has no role, got {role}; leave out one of them")
        if channel not in ledger.channels():
            hint = nearest(channel, ledger.channels())
            raise NotFoundError(f"token: there is no channel {channel!r}{hint}; the first release of a run creates it")
        return Issued(*issue(ledger, workspace.actor, principal, {ledger.project: f"{CALLS}{channel}"}, days * _DAY))
    most = role if role is not None else known.get(principal)
    if most is None:
        hint = meant_name(principal, known) or (f" (with a role: {', '.join(known)})" if known else "")
        raise InputError(
            f"token: {principal} has no role here{hint}; assign one: posttrain member set {principal} ROLE"
        )
    return Issued(*issue(ledger, workspace.actor, principal, {ledger.project: str(_role(most))}, days * _DAY))


@answers(Control.rotate_token)
def rotate_token(workspace: Workspace, token_id: str, days: float) -> Issued:
    return Issued(*rotate(workspace.ledger, workspace.actor, token_id, days * _DAY))


@answers(Control.revoke_token)
def revoke_token(workspace: Workspace, token_id: str) -> list[Token]:
    if all(one.id != token_id for one in workspace.ledger.tokens()):
        raise NotFoundError(f"there is no token {token_id[:80]!r}; posttrain token ls shows them")
    with workspace.ledger.transaction(workspace.actor) as transaction:
        transaction.revoke_token(token_id)
    return workspace.ledger.tokens()


def _role(word: str) -> Role:
    try:
        return Role(word)
    except ValueError as error:
        raise InputError(
            f"role must be one of {', '.join(Role)}, got {word[:40]!r}{meant(word, map(str, Role))}"
        ) from error
