"""A fake authenticator with fixed identities."""

from collections.abc import Mapping

from posttrain.access.ports import Identity
from posttrain.domain.errors import AccessError


class FakeAuthenticator:
    """Identifies principals by a table of proofs.

    Args:
        known: proof → identity.
    """

    auth = "fake"

    def __init__(self, known: Mapping[str, Identity]) -> None:
        self._known = known

    def authenticate(self, proof: str) -> Identity:
        """See `Authenticator.authenticate`."""
        if proof not in self._known:
            raise AccessError("no identity has this proof; use another")
        return self._known[proof]
