"""The port of authenticators, which identify principals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from posttrain.domain.ids import Role

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
