"""Whether a token is good at this moment, however somebody shows it."""

from __future__ import annotations

from posttrain.access.ports import Identity
from posttrain.domain.errors import AccessError
from posttrain.domain.principals import NOBODY, Role
from posttrain.domain.records import Token


def identity_of(token: Token | None, moment: float, auth: str, unknown: str) -> Identity:
    """Who stands behind a token that was found.

    Args:
        unknown: what to say where there is none.

    Raises:
        AccessError: there is none, or it is good for nothing any more.
    """
    if token is None or token.actor.startswith(NOBODY):
        raise AccessError(unknown)
    if token.revoked_at is not None:
        raise AccessError(f"token {token.id} was revoked; ask an admin for another one")
    if moment >= token.expires_at:
        raise AccessError(f"token {token.id} has expired; ask an admin for another one")
    return Identity(token.actor, auth, {name: Role(role) for name, role in token.scopes.items()})
