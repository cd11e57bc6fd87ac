"""Writing who may do what. Events name principals by their ids, and tokens by the digests of their secrets."""

from __future__ import annotations

from sqlalchemy import delete, select

from posttrain.domain.errors import ConflictError
from posttrain.domain.records import Token
from posttrain.domain.roles import Role
from posttrain.store.audited import REMOVED, Change
from posttrain.store.schema import projects, roles, tokens
from posttrain.store.writing import Writing


class GrantWriting(Writing):
    """The part of a transaction that is about access."""

    def set_role(self, name: str, role: Role | None) -> None:
        """Give a principal a role in this project, another one, or none.

        Whoever gives the first one becomes an admin: until then everybody who could open the ledger was.

        Raises:
            ConflictError: nobody would be an admin any more.
        """
        if self._connection.dialect.name == "postgresql":  # on SQLite one writes at a time
            self._connection.execute(select(projects.c.id).where(projects.c.id == self._project).with_for_update())
        known, own = self.snapshot.roles(), self._journal.author.name
        after: dict[str, Role | None] = {**(known or {own: Role.ADMIN}), name: role}
        if Role.ADMIN not in after.values():
            raise ConflictError(f"project {self._project}: must have an admin, got {name} as the last; name another")
        for one, wanted in after.items():
            if known.get(one) != wanted:
                self._set_role(self._journal.principal(one), wanted)

    def _set_role(self, principal: str, role: Role | None) -> None:
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
        """Let a token be good for nothing from now on; False: it was revoked before, or there is none."""
        live = select(tokens.c.id).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
        if self._connection.execute(live.with_for_update()).first() is None:
            return False
        return self._change(tokens, {"id": token_id}, {"revoked_at": self._clock.now()}, "token.revoked", token_id)
