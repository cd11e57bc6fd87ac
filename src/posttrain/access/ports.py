"""The port for whoever knows who somebody is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from posttrain.domain.ids import Role

OS = "os"  # how somebody is known whom the operating system lets in


@dataclass(frozen=True, slots=True)
class Identity:
    """Who somebody is, and how that is known."""

    principal: str  # user:ann, service:ci
    auth: str  # as events say it: os | token
    scopes: Mapping[str, Role] | None = None  # project → the most that may be done there; None: whatever the roles say


class Authenticator(Protocol):
    """Knows who somebody is by what they show.

    Every implementation: the same proof is the same identity as long as it is good; any other is refused with an
    AccessError of one line that does not say the proof; nothing is written, so nothing of the proof is in any log.
    """

    @property
    def auth(self) -> str:
        """How events say that somebody was known by it: at most 16 letters."""

    def authenticate(self, proof: str) -> Identity:
        """Who shows this.

        Raises:
            AccessError: nobody whom it knows.
        """
