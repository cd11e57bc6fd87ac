"""Which role somebody has in a project."""

from __future__ import annotations

from posttrain.access.ports import OS, Identity
from posttrain.domain.principals import Role, lower
from posttrain.store.ledger import Ledger


def role_of(ledger: Ledger, identity: Identity) -> Role | None:
    """The role of somebody in the project of a ledger, as of now; None: they have none.

    Where nobody was given a role yet, whoever the operating system lets open the ledger is its admin: a workspace of
    one's own. A token never has more than its scopes say.
    """
    with ledger.snapshot() as now:
        known = now.roles()
    role = known.get(identity.principal)
    if not known and identity.auth == OS:
        role = Role.ADMIN
    if role is None or identity.scopes is None:
        return role
    most = identity.scopes.get(ledger.project)
    return None if most is None else lower(role, most)
