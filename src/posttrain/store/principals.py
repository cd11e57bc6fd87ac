"""Reading who may do what: roles in the project, and tokens for it."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select

from posttrain.domain.ids import Role
from posttrain.domain.records import Token
from posttrain.store.rows import to_record
from posttrain.store.schema import events, principals, projects, roles, sessions, tokens
from posttrain.store.scope import across

_ROLES = select(principals.c.name, roles.c.role).join(principals, principals.c.id == roles.c.principal)
_ROLES = _ROLES.where(roles.c.project == bindparam("of_project")).order_by(principals.c.name)
_TOKENS = select(tokens, principals.c.name.label("actor")).join(principals, principals.c.id == tokens.c.principal)


class PrincipalReading:
    """The part of a snapshot that is about access."""

    _connection: Connection
    _project: str

    def roles(self) -> dict[str, Role]:
        """Principal → role in this project; empty: nobody was given one."""
        return {name: Role(role) for name, role in self._connection.execute(_ROLES, {"of_project": self._project})}

    def people(self) -> set[str]:
        """Principals who have a role in this project, or did something there. Reads who wrote every event."""
        acted = select(events.c.principal).where(events.c.project == self._project).distinct()
        query = select(principals.c.name).where(principals.c.id.in_(acted))
        return {str(name) for name in self._connection.execute(query).scalars()} | set(self.roles())

    def principal_of(self, name: str) -> str | None:
        """The pseudonymous id of whoever is called so; None: nobody is."""
        found = self._connection.execute(select(principals.c.id).where(principals.c.name == name)).scalar()
        return None if found is None else str(found)

    def projects(self) -> list[str]:
        """Every project of the ledger, by name."""
        return list(self._connection.execute(select(projects.c.id).order_by(projects.c.id)).scalars())

    def images(self) -> list[str] | None:
        """The images that runs of this project may name; None: nobody said."""
        found = self._connection.execute(select(projects.c.images).where(projects.c.id == self._project)).scalar()
        return None if found is None else list(found)

    def roles_of(self, name: str) -> dict[str, Role]:
        """Project → the role that a principal was given there."""
        query = select(roles.c.project, roles.c.role).join(principals, principals.c.id == roles.c.principal)
        query = across(query.where(principals.c.name == name), "a principal has roles in several projects")
        found = self._connection.execute(query.order_by(roles.c.project))
        return {project: Role(role) for project, role in found}

    def tokens(self) -> list[Token]:
        """Every token that is for this project, oldest first."""
        query = _TOKENS.order_by(tokens.c.created_at, tokens.c.id)
        found = [to_record(Token, row) for row in self._connection.execute(query)]
        return [one for one in found if self._project in one.scopes]

    def token_behind(self, session: str, moment: float) -> Token | None:
        """The token behind a browser's session of this digest; None: there is none, or it is over."""
        query = _TOKENS.join(sessions, sessions.c.token == tokens.c.id)
        query = query.where(sessions.c.digest == session, sessions.c.expires_at > moment)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else to_record(Token, row)

    def token_of(self, secret_digest: str) -> Token | None:
        """The token whose secret has this digest; None: there is none."""
        row = self._connection.execute(_TOKENS.where(tokens.c.secret_digest == secret_digest)).one_or_none()
        return None if row is None else to_record(Token, row)
