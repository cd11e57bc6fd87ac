"""Where the command line and the Python API get what they ask: a `Control` over a workspace.

Projects, members and tokens. What a verb needs is imported when it is asked for.

Sinks of this workspace. What a verb needs is imported when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posttrain.access.ports import OS
from posttrain.api.access import Issued, Whoami
from posttrain.app.embedded.assets import Assets, Models
from posttrain.app.embedded.channels import Channels, Records
from posttrain.app.embedded.runs import Runs, Submissions
from posttrain.domain.errors import InputError, NotFoundError, meant, meant_name
from posttrain.domain.ids import TYPES
from posttrain.domain.images import image_rule
from posttrain.domain.places import PROJECT_VARIABLE, SERVER_VARIABLE
from posttrain.domain.principals import Role, is_project
from posttrain.domain.records import DEFAULT_PROJECT

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.app.workspace import Workspace
    from posttrain.domain.records import Token
    from posttrain.domain.sinks import SinkView

_DAY = 86400.0  # seconds


class Access:
    """See `api.access.Access`."""

    workspace: Workspace

    def whoami(self) -> Whoami:
        """See `Access.whoami`."""
        ledger, actor = self.workspace.ledger, self.workspace.actor
        with ledger.snapshot() as now:
            given = {project: str(role) for project, role in now.roles_of(actor).items()}
        return Whoami(actor, ledger.auth, ledger.project, given.get(ledger.project), given)

    def add_project(self, name: str) -> Whoami:
        """See `Access.add_project`."""
        if self.workspace.ledger.project != DEFAULT_PROJECT:
            raise InputError(
                f"a project is made by an admin of {DEFAULT_PROJECT}, asked in {self.workspace.ledger.project}; "
                f"ask there: --project {DEFAULT_PROJECT}"
            )
        if not is_project(name):
            raise InputError(f"project {name[:80]!r}: must be 1-63 of a-z 0-9 - and begin with a letter or digit")
        made = self.workspace.seen_by(self.workspace.actor, name, self.workspace.ledger.auth)
        with made.ledger.transaction(made.actor) as transaction:
            transaction.add_project()
        self.workspace.seal()
        return self.whoami()

    def images(self) -> list[str] | None:
        """See `Access.images`."""
        with self.workspace.ledger.snapshot() as now:
            return now.images()

    def allow_image(self, image: str) -> list[str] | None:
        """See `Access.allow_image`."""
        rule = image_rule(image)
        with self.workspace.ledger.transaction(self.workspace.actor) as transaction:
            transaction.allow_image(rule)
        self.workspace.seal()
        return self.images()

    def remove_image(self, image: str) -> list[str] | None:
        """See `Access.remove_image`."""
        with self.workspace.ledger.transaction(self.workspace.actor) as transaction:
            transaction.remove_image(image)
        self.workspace.seal()
        return self.images()

    def members(self) -> dict[str, str]:
        """See `Access.members`."""
        with self.workspace.ledger.snapshot() as now:
            return {name: str(role) for name, role in now.roles().items()}

    def set_member(self, principal: str, role: str | None) -> dict[str, str]:
        """See `Access.set_member`."""
        with self.workspace.ledger.transaction(self.workspace.actor) as transaction:
            transaction.set_role(principal, None if role is None else _role(role))
        self.workspace.seal()
        return self.members()

    def tokens(self) -> list[Token]:
        """See `Access.tokens`."""
        with self.workspace.ledger.snapshot() as now:
            return now.tokens()

    def issue_token(self, principal: str, role: str | None, days: float) -> Issued:
        """See `Access.issue_token`."""
        from posttrain.access.authenticators.token import issue, refuse_unnamed

        refuse_unnamed(principal)
        ledger, known = self.workspace.ledger, self.members()
        most = role if role is not None else known.get(principal)
        if most is None:
            hint = meant_name(principal, known) or (f" (who has one: {', '.join(known)})" if known else "")
            raise InputError(
                f"token: {principal} has no role here{hint}; posttrain member set {principal} ROLE gives them one"
            )
        secret, token = issue(ledger, self.workspace.actor, principal, {ledger.project: _role(most)}, days * _DAY)
        self.workspace.seal()
        return Issued(secret, token)

    def rotate_token(self, token_id: str, days: float) -> Issued:
        """See `Access.rotate_token`."""
        from posttrain.access.authenticators.token import rotate

        secret, token = rotate(self.workspace.ledger, self.workspace.actor, token_id, days * _DAY)
        self.workspace.seal()
        return Issued(secret, token)

    def revoke_token(self, token_id: str) -> list[Token]:
        """See `Access.revoke_token`."""
        known = self.tokens()
        if all(one.id != token_id for one in known):
            raise NotFoundError(f"there is no token {token_id[:80]!r}; posttrain token ls shows them")
        with self.workspace.ledger.transaction(self.workspace.actor) as transaction:
            transaction.revoke_token(token_id)
        self.workspace.seal()
        return self.tokens()


def _role(word: str) -> Role:
    try:
        return Role(word)
    except ValueError as error:
        raise InputError(
            f"role must be one of {', '.join(Role)}, got {word[:40]!r}{meant(word, map(str, Role))}"
        ) from error


class Sinks:
    """See `api.control.Sinks`."""

    workspace: Workspace

    def sinks(self) -> list[SinkView]:
        """See `Sinks.sinks`."""
        from posttrain.app.sinks import views

        return views(self.workspace)

    def add_sink(
        self, name: str, kind: str, settings: Mapping[str, Any], rule: Mapping[str, Any], *, from_start: bool = False
    ) -> SinkView:
        """See `Sinks.add_sink`."""
        from posttrain.app.sinks import add, view

        add(self.workspace, name, kind, settings, rule, from_start=from_start)
        return view(self.workspace, name)

    def test_sink(self, name: str) -> str:
        """See `Sinks.test_sink`."""
        from posttrain.app.sinks import send_test

        return send_test(self.workspace, name)

    def pause_sink(self, name: str) -> SinkView:
        """See `Sinks.pause_sink`."""
        from posttrain.app.sinks import pause, view

        pause(self.workspace, name)
        return view(self.workspace, name)

    def resume_sink(self, name: str, *, skip: bool = False) -> SinkView:
        """See `Sinks.resume_sink`."""
        from posttrain.app.sinks import resume, view

        resume(self.workspace, name, skip=skip)
        return view(self.workspace, name)

    def remove_sink(self, name: str) -> None:
        """See `Sinks.remove_sink`."""
        from posttrain.app.sinks import remove

        remove(self.workspace, name)


class Embedded(Submissions, Runs, Channels, Records, Assets, Models, Access, Sinks):
    """`api.control.Control` in this process."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def close(self) -> None:
        """See `Control.close`."""
        self.workspace.close()


def control_of(given: Workspace | Control) -> Control:
    """Over an open workspace, for the user that the operating system knows; what is a `Control` stays what it is."""
    from posttrain.access.ports import Identity
    from posttrain.access.roles import role_of
    from posttrain.api.guarding import guarded
    from posttrain.app.workspace import Workspace

    if not isinstance(given, Workspace):
        return given
    known, ledger = Identity(given.actor, OS), given.ledger
    return guarded(Embedded(given), given.actor, ledger.project, lambda: role_of(ledger, known))


def open_control() -> Control:
    """Over the server that the environment names; else over the nearest workspace, by its server where it has one.

    Raises:
        WorkspaceError: there is none, or it cannot be opened.
        NotFoundError: the workspace has no project of the name that the environment gives.
        InputError: that is no name of a project; the environment names a server that nobody logged in to.
    """
    project = os.environ.get(PROJECT_VARIABLE, "")
    TYPES["ProjectId"].check(project or None, f"--project or {PROJECT_VARIABLE}")
    if os.environ.get(SERVER_VARIABLE):  # first: whoever asks a server loads nothing of a workspace
        from posttrain.client.logins import logged_in

        return logged_in(os.environ[SERVER_VARIABLE], project)
    from posttrain.app.workspace import Workspace, find_workspace
    from posttrain.workspace.served import served_at

    root = find_workspace()
    served = served_at(root)
    if served is not None:
        from posttrain.client.remote import remote_control

        return remote_control(served.url, served.key, project or DEFAULT_PROJECT)
    workspace = Workspace(root)
    if project not in ("", DEFAULT_PROJECT):
        with workspace.ledger.snapshot() as now:
            known = now.projects()
        if project not in known:
            workspace.close()
            listed = ", ".join(known)
            raise NotFoundError(f"there is no project {project!r}, known are {listed}; posttrain project add {project}")
        workspace = workspace.seen_by(workspace.actor, project, OS)
    return control_of(workspace)
