"""The port of authenticators, which identify principals, and the role of a principal in a project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from posttrain.domain.errors import AccessError
from posttrain.domain.ids import NOBODY, Role, lower
from posttrain.domain.records import CALLS, Token

if TYPE_CHECKING:
    from posttrain.store.ledger import Ledger

OS = "os"  # the authenticator of users of the operating system


@dataclass(frozen=True, slots=True)
class Identity:
    """A principal, and how it was identified."""

    principal: str  # user:ann, service:ci
    auth: str  # the authenticator's name in events: os | token
    scopes: Mapping[str, Role] | None = None  # project → highest role there; None: the ledger's roles apply


class Authenticator(Protocol):
    """Identifies a principal by a proof.

    Every implementation returns the same identity for the same valid proof. For any other proof it raises a one-line
    AccessError that does not contain the proof. It writes nothing, so no log contains a proof.
    """

    @property
    def auth(self) -> str:
        """The authenticator's name in events: at most 16 letters."""

    def authenticate(self, proof: str) -> Identity:
        """Return the identity behind a proof.

        Raises:
            AccessError: the proof is not valid.
        """


def role_of(ledger: Ledger, identity: Identity) -> Role | None:
    """Return an identity's current role in the ledger's project; None: the identity has no role.

    In a ledger without any roles (a workspace of one user), each user of the operating system who can open the ledger
    is an admin. A token never grants more than its scopes.
    """
    known = ledger.roles()
    role = known.get(identity.principal) if known or identity.auth != OS else Role.ADMIN
    if role is None or identity.scopes is None:
        return role
    most = identity.scopes.get(ledger.project)
    return None if most is None else lower(role, most)


def identity_of(token: Token | None, moment: float, auth: str, unknown: str) -> Identity:
    """Return the identity of a token.

    Args:
        unknown: the error message if there is no token.

    Raises:
        AccessError: there is no token, or it was revoked or has expired.
    """
    if token is None or token.actor.startswith(NOBODY):
        raise AccessError(unknown)
    if token.revoked_at is not None:
        raise AccessError(f"token {token.id} was revoked; ask an admin for a new one")
    if moment >= token.expires_at:
        raise AccessError(f"token {token.id} has expired; ask an admin for a new one")
    roles = {name: Role(role) for name, role in token.scopes.items() if not role.startswith(CALLS)}
    return Identity(token.actor, auth, roles)
