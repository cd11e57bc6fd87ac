"""Which role somebody has in a project.

Whether a token is good at this moment, however somebody shows it.
"""

from posttrain.access.ports import OS, Identity
from posttrain.domain.errors import AccessError
from posttrain.domain.ids import NOBODY, Role, lower
from posttrain.domain.records import Token
from posttrain.store.hosts import Ledger


def role_of(ledger: Ledger, identity: Identity) -> Role | None:
    """The role of somebody in the project of a ledger, as of now; None: they have none.

    Where nobody was given a role yet, whoever the operating system lets open the ledger is its admin: a workspace of
    one's own. A token never has more than its scopes say.
    """
    known = ledger.roles()
    role = known.get(identity.principal) if known or identity.auth != OS else Role.ADMIN
    if role is None or identity.scopes is None:
        return role
    most = identity.scopes.get(ledger.project)
    return None if most is None else lower(role, most)


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
