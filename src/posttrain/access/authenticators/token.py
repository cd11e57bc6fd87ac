"""Tokens: 256 random bits that a principal shows. The ledger keeps their SHA-256, which tells nothing of them."""

import base64
import re
from collections.abc import Mapping

from posttrain.access.ports import Identity
from posttrain.access.roles import identity_of
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import AccessError, InputError, NotFoundError
from posttrain.domain.ids import FORM, Role, is_principal
from posttrain.domain.records import Token
from posttrain.store.hosts import Ledger
from posttrain.store.transaction import Transaction

TOKEN = "token"
PREFIX = "posttrain_"  # so that scanners of repositories and logs know one when they see it
LONGEST = 366 * 86400.0  # seconds that a token may be good for
_BYTES, _ID_BYTES = 32, 8
_FORM = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")


class TokenAuthenticator:
    """Knows principals by tokens that are neither expired nor revoked, at this moment."""

    auth = TOKEN

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def authenticate(self, proof: str) -> Identity:
        """See `Authenticator.authenticate`."""
        if not _FORM.fullmatch(proof):
            raise AccessError(f"a token must be {PREFIX} and 43 letters, digits, - or _; got something else")
        token = self._ledger.token_of(digest_bytes(proof.encode()))
        unknown = "the token is not known here; ask an admin for another one"
        return identity_of(token, self._ledger.clock.now(), self.auth, unknown)


def issue(ledger: Ledger, actor: str, principal: str, scopes: Mapping[str, Role], seconds: float) -> tuple[str, Token]:
    """A new token, and what the ledger knows of it. The token itself is kept nowhere.

    Args:
        actor: who issues it.
        principal: who will show it.
        scopes: the ledger's project → the most that may be done there with it.
        seconds: that it is good for.

    Raises:
        InputError: a time that is not from now to a year from now; no scope, or one of another project; no principal.
    """
    _refuse_long(seconds)
    refuse_unnamed(principal)
    if not scopes:
        raise InputError("token: must have a scope, got none; name a project and the role that it may have there")
    if set(scopes) != {ledger.project}:
        got = ", ".join(sorted(scopes))
        raise InputError(
            f"token: must be for project {ledger.project}, whose admin issues it, got {got}; issue it there"
        )
    with ledger.transaction(actor) as transaction:
        return _add(ledger, transaction, principal, {name: str(role) for name, role in scopes.items()}, seconds)


def rotate(ledger: Ledger, actor: str, token_id: str, seconds: float) -> tuple[str, Token]:
    """A token in the place of another one, which is good for nothing from this moment on.

    Raises:
        InputError: as `issue`; or the other was revoked before, or has expired.
        NotFoundError: the project has none.
    """
    _refuse_long(seconds)
    with ledger.transaction(actor) as transaction:
        old = next((one for one in transaction.snapshot.tokens() if one.id == token_id), None)
        if old is None:
            raise NotFoundError(f"there is no token {token_id!r}")
        if ledger.clock.now() >= old.expires_at:
            raise InputError(f"token {token_id} has expired, so nothing takes its place; issue another one")
        if not transaction.revoke_token(token_id):
            raise InputError(f"token {token_id} was revoked before, so nothing takes its place; issue another one")
        return _add(ledger, transaction, old.actor, old.scopes, seconds, old.id)


def refuse_unnamed(principal: str) -> None:
    """Refuse a token for what names nobody.

    Raises:
        InputError: it does not.
    """
    if not is_principal(principal):
        hint = f"; write user:{principal}" if is_principal(f"user:{principal}") and ":" not in principal else ""
        raise InputError(f"token: must be for {FORM}, got {principal!a}{hint}")


def _refuse_long(seconds: float) -> None:
    if not 0 < seconds <= LONGEST:
        raise InputError(f"token: must be good for at most {LONGEST / 86400:g} days, got {seconds / 86400:g}")


def _add(
    ledger: Ledger,
    transaction: Transaction,
    principal: str,
    scopes: Mapping[str, str],
    seconds: float,
    replaces: str | None = None,
) -> tuple[str, Token]:
    secret = PREFIX + base64.urlsafe_b64encode(ledger.entropy(_BYTES)).decode().rstrip("=")
    now = ledger.clock.now()
    token = Token(ledger.entropy(_ID_BYTES).hex(), principal, dict(scopes), now, now + seconds, replaces=replaces)
    transaction.add_token(token, digest_bytes(secret.encode()))
    return secret, token
