"""Sessions of browsers: 256 random bits in a cookie, which stand for a token. The end of the token ends them.

The ledger keeps the SHA-256 of the bits, and the token is in no cookie, so neither reveals the other.
"""

import base64
import re

from posttrain.access.ports import Identity
from posttrain.access.roles import identity_of
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import AccessError
from posttrain.store.grants import begin_session, end_session
from posttrain.store.hosts import Ledger

SESSION = "session"
SECONDS = 12 * 3600.0  # that a session lasts, where its token does
_BYTES = 32
_FORM = re.compile(r"[A-Za-z0-9_-]{43}")


class SessionAuthenticator:
    """Identifies principals by sessions that are not over, of tokens that are neither expired nor revoked."""

    auth = SESSION

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def authenticate(self, proof: str) -> Identity:
        """See `Authenticator.authenticate`."""
        if not _FORM.fullmatch(proof):
            raise AccessError("a session must be 43 letters, digits, - or _; got something else; log in")
        now = self._ledger.clock.now()
        with self._ledger.snapshot() as ledger:
            token = ledger.token_behind(digest_bytes(proof.encode()), now)
        return identity_of(token, now, self.auth, "the session is over; log in again")


def begin(ledger: Ledger, proof: str) -> str:
    """Begin a session for a token and return its secret, which is stored nowhere.

    Args:
        proof: a valid token.
    """
    secret = base64.urlsafe_b64encode(ledger.entropy(_BYTES)).decode().rstrip("=")
    token = ledger.token_of(digest_bytes(proof.encode()))
    if token is None:  # revoked tokens stay, so it never existed
        raise AccessError("the token is not known here; ask an admin for another one")
    until = min(token.expires_at, ledger.clock.now() + SECONDS)
    begin_session(ledger, digest_bytes(secret.encode()), token.id, until)
    return secret


def end(ledger: Ledger, secret: str) -> None:
    """End a session."""
    end_session(ledger, digest_bytes(secret.encode()))
