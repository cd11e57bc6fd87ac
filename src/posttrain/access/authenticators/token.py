"""Tokens: 256 random bits that a principal sends. The ledger stores only their SHA-256, which does not reveal them."""

import base64
import re
from collections.abc import Mapping

from posttrain.access.ports import Identity, identity_of, role_of
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import AccessError, AuthenticationError, InputError, NotFoundError
from posttrain.domain.ids import FORM, is_principal
from posttrain.domain.records import CALLS, Token
from posttrain.store.ledger import Ledger
from posttrain.store.transaction import Transaction

TOKEN = "token"
PREFIX = "posttrain_"  # scanners of repositories and logs recognise tokens by this prefix
LONGEST = 366 * 86400.0  # seconds that a token may be valid
_BYTES, _ID_BYTES = 32, 8
_FORM = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")


class TokenAuthenticator:
    """Identifies principals by tokens that are neither expired nor revoked."""

    auth = TOKEN

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def authenticate(self, proof: str) -> Identity:
        """See `Authenticator.authenticate`."""
        return self._known(proof)[0]

    def may_call(self, proof: str, channel: str | None) -> Identity:
        """Identify a caller of a served model: a member of the project, or the holder of a key for the channel.

        Args:
            channel: the served channel; None: only members may call the model.

        Raises:
            AuthenticationError: the proof is not valid.
            AccessError: the proof is valid for something else.
        """
        try:
            identity, token = self._known(proof)
        except AccessError as error:
            raise AuthenticationError(str(error)) from error
        scope = token.scopes.get(self._ledger.project, "")
        if scope.startswith(CALLS) and scope.removeprefix(CALLS) != channel:
            raise AccessError(f"key {token.id} is for channel {scope.removeprefix(CALLS)}; ask for a key of this model")
        if not scope.startswith(CALLS) and role_of(self._ledger, identity) is None:
            raise AccessError(f"token {token.id} has no role in this project; ask an admin for a key")
        return identity

    def _known(self, proof: str) -> tuple[Identity, Token]:
        if not _FORM.fullmatch(proof):
            raise AccessError(f"a token must be {PREFIX} and 43 letters, digits, - or _; got something else")
        token = self._ledger.token_of(digest_bytes(proof.encode()))
        unknown = "the token is unknown; ask an admin for a new one"
        identity = identity_of(token, self._ledger.clock.now(), self.auth, unknown)
        assert token is not None
        return identity, token


def issue(ledger: Ledger, actor: str, principal: str, scopes: Mapping[str, str], seconds: float) -> tuple[str, Token]:
    """Issue a token; return the token and its record in the ledger. The token itself is stored nowhere.

    Args:
        actor: the principal that issues the token.
        principal: the principal that the token identifies.
        scopes: see `Token.scopes`; the only possible project is the ledger's.
        seconds: the validity of the token.

    Raises:
        InputError: the validity is not positive or exceeds `LONGEST`; there is no scope, or a scope names another
            project; the principal is invalid.
    """
    _refuse_long(seconds)
    refuse_unnamed(principal)
    if not scopes:
        raise InputError("token: must have a scope, got none; name a project and a role in it")
    if set(scopes) != {ledger.project}:
        got = ", ".join(sorted(scopes))
        raise InputError(f"token: must be for project {ledger.project}, got {got}; issue it in that project")
    with ledger.transaction(actor) as transaction:
        return _add(ledger, transaction, principal, dict(scopes), seconds)


def rotate(ledger: Ledger, actor: str, token_id: str, seconds: float) -> tuple[str, Token]:
    """Replace a token by a new token and revoke the old token immediately.

    Raises:
        InputError: the token was revoked or has expired; the new validity is not positive or exceeds `LONGEST`.
        NotFoundError: the project has no such token.
    """
    _refuse_long(seconds)
    with ledger.transaction(actor) as transaction:
        old = next((one for one in transaction.snapshot.tokens() if one.id == token_id), None)
        if old is None:
            raise NotFoundError(f"there is no token {token_id!r}; posttrain token ls shows them")
        if ledger.clock.now() >= old.expires_at:
            raise InputError(f"token {token_id} has expired and cannot be replaced; issue a new one")
        if not transaction.revoke_token(token_id):
            raise InputError(f"token {token_id} is revoked and cannot be replaced; issue a new one")
        return _add(ledger, transaction, old.actor, old.scopes, seconds, old.id)


def refuse_unnamed(principal: str) -> None:
    """Check that a name is a principal for whom a token can be issued.

    Raises:
        InputError: the name is not a principal.
    """
    if not is_principal(principal):
        hint = f"; write user:{principal}" if is_principal(f"user:{principal}") and ":" not in principal else ""
        raise InputError(f"token: must be for {FORM}, got {principal!a}{hint}")


def _refuse_long(seconds: float) -> None:
    if not 0 < seconds <= LONGEST:
        raise InputError(f"token: must be valid for at most {LONGEST / 86400:g} days, got {seconds / 86400:g}")


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
