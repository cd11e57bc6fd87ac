"""Writing who may do what. Events name principals by their ids, and tokens by the digests of their secrets."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select, update

from posttrain.domain.errors import ConflictError, InputError, NotFoundError
from posttrain.domain.ids import FORM, Role, is_principal
from posttrain.domain.ports import Clock
from posttrain.domain.records import Token
from posttrain.store.journal import CHANGED, REMOVED, Author, Change, Journal
from posttrain.store.schema import channels, projects, roles, tokens
from posttrain.store.snapshot import Snapshot
from posttrain.store.writing import Writing

_MOST_IMAGES = 256  # that a project allows


class GrantWriting(Writing):
    """The part of a transaction that is about access."""

    def add_project(self) -> None:
        """Make this transaction's project, with whoever makes it as its admin.

        Raises:
            ConflictError: there is one of that name.
        """
        self._insert(projects, {"id": self._project, "created_at": self._clock.now()}, f"project {self._project}",
            "project.added", self._project)  # fmt: skip
        self.set_role(self._journal.author.name, Role.ADMIN)

    def allow_image(self, rule: str) -> None:
        """Let runs of this project name an image (`domain.requests`); saying it again changes nothing.

        Raises:
            InputError: the project allows as many as it may.
        """
        _lock(self._connection, self._project)
        known = self.snapshot.images() or []
        if rule in known:
            return
        if len(known) >= _MOST_IMAGES:
            raise InputError(
                f"project {self._project}: may allow at most {_MOST_IMAGES} images, got {len(known) + 1}; remove one "
                "with posttrain project remove-image, or allow a repository: NAME@*"
            )
        self._set_images([*known, rule])

    def remove_image(self, rule: str) -> None:
        """Let no new run of this project name an image any more.

        Raises:
            NotFoundError: it allows others, and not this one.
        """
        _lock(self._connection, self._project)
        known = self.snapshot.images()
        if known is None or rule not in known:
            raise NotFoundError(
                f"project {self._project}: does not allow image {rule[:120]!a}; posttrain project images shows those "
                "that it does"
            )
        self._set_images([one for one in known if one != rule])

    def _set_images(self, images: list[str]) -> None:
        key = {"id": self._project}
        self._change(projects, key, {"images": sorted(images)}, "project.images", self._project)

    def set_role(self, name: str, role: Role | None) -> None:
        """Give a principal a role in this project, another one, or none.

        Whoever gives the first one becomes an admin: until then everybody who could open the ledger was.

        Raises:
            ConflictError: nobody would be an admin any more.
            InputError: a name that no policy could name either.
        """
        if role is not None and not is_principal(name):
            raise InputError(f"role {role}: must be of {FORM}, got {name!a}")
        _lock(self._connection, self._project)
        known, own = self.snapshot.roles(), self._journal.author.name
        after: dict[str, Role | None] = {**(known or {own: Role.ADMIN}), name: role}
        if Role.ADMIN not in after.values():
            raise ConflictError(f"project {self._project}: must have an admin, got {name} as the last; name another")
        for one, wanted in after.items():
            if known.get(one) != wanted:
                self._set_role(self._journal.principal(one), wanted)

    def _set_role(self, principal: str, role: Role | None) -> None:
        self._woken |= set(self.snapshot.runs_that_wait_for_approval())  # whose approvals count is another now
        key = {"project": self._project, "principal": principal}
        if role is None:
            here = (roles.c.project == self._project) & (roles.c.principal == principal)
            self._connection.execute(delete(roles).where(here))
            self._journal.tell("role.withdrawn", principal, Change(REMOVED, "roles", key, {}))
        elif not self._change(roles, key, {"role": str(role)}, "role.granted", principal):
            self._insert(roles, {**key, "role": str(role)}, f"role of {principal}", "role.granted", principal)

    def add_token(self, token: Token, secret_digest: str) -> None:
        """A token that was issued; of its secret nothing but the digest is known here."""
        columns = {
            "id": token.id,
            "principal": self._journal.principal(token.actor),
            "secret_digest": secret_digest,
            "scopes": dict(token.scopes),
            "created_at": token.created_at,
            "expires_at": token.expires_at,
            "revoked_at": None,
            "replaces": token.replaces,
        }
        self._insert(tokens, columns, f"token {token.id}", "token.issued", token.id)

    def revoke_token(self, token_id: str) -> bool:
        """Let a token be good for nothing from now on; False: it was revoked before, or the project has none."""
        if all(one.id != token_id for one in self.snapshot.tokens()):
            return False
        live = select(tokens.c.id).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
        if self._connection.execute(live.with_for_update()).first() is None:
            return False
        return self._change(tokens, {"id": token_id}, {"revoked_at": self._clock.now()}, "token.revoked", token_id)


def end_access(connection: Connection, author: Author, clock: Clock, principal: str) -> None:
    """Take every role from a principal, in every project, and revoke their tokens.

    Raises:
        ConflictError: a project would have no admin any more.
    """
    held = connection.execute(select(roles.c.project, roles.c.role).where(roles.c.principal == principal)).all()
    for project, role in sorted((str(row[0]), Role(row[1])) for row in held):
        _lock(connection, project)
        here = (roles.c.project == project) & (roles.c.principal == principal)
        others = select(roles.c.role).where(roles.c.project == project, roles.c.principal != principal)
        if role is Role.ADMIN and Role.ADMIN not in connection.execute(others).scalars().all():
            raise ConflictError(f"project {project}: must have an admin, and this is the last; name another first")
        connection.execute(delete(roles).where(here))
        journal = Journal(connection, author, clock, project)
        gone = Change(REMOVED, "roles", {"project": project, "principal": principal}, {})
        journal.tell("role.withdrawn", principal, gone)
        journal.flush(Snapshot(connection, project).runs_that_wait_for_approval())
    live = select(tokens.c.id, tokens.c.scopes).where(tokens.c.principal == principal, tokens.c.revoked_at.is_(None))
    for token, scopes in connection.execute(live.with_for_update()).all():
        now = {"revoked_at": clock.now()}
        connection.execute(update(tokens).where(tokens.c.id == token).values(**now))
        journal = Journal(connection, author, clock, next(iter(scopes)))
        journal.tell("token.revoked", str(token), Change(CHANGED, "tokens", {"id": token}, now))
        journal.flush()


def _lock(connection: Connection, project: str) -> None:
    """Lock a project's roles until the end of the transaction, and who begins to wait for an approval meanwhile."""
    if connection.dialect.name == "postgresql":  # on SQLite one writes at a time
        connection.execute(select(projects.c.id).where(projects.c.id == project).with_for_update())
        mine = select(channels.c.name).where(channels.c.project == project)
        connection.execute(mine.order_by(channels.c.name).with_for_update())
