"""What an event consists of: an envelope that is kept for ever, and words that may be erased.

The envelope holds states, numbers, digests and pseudonymous ids. Free text and personal data are its *words*: a payload
of their own, which the envelope names by a salted digest, so that neither can be changed unseen, and an erased payload
cannot be guessed from its digest. An event's leaf is the RFC 6962 hash of its canonical envelope. It has no sequence
number: the sealer gives it its place later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.domain.canonical import canonical_json, digest_bytes
from posttrain.store.merkle import leaf_hash

CREATED, UPGRADED = "ledger.created", "ledger.upgraded"  # the first event of a log is one of them
ERASED = "words.erased"  # its `erased` are the digests of payloads that are gone
RETAINED = "run"  # retention class of words: as long as the run, asset or channel they are about
SALT = 16  # bytes
FIELDS = ("project", "kind", "subject", "principal", "auth", "request", "at", "audited", "words")
_EXACT = 2**53  # whole numbers from here on are not the same in every JSON reader


@dataclass(frozen=True, slots=True)
class Payload:
    """The words of an event."""

    retention: str
    salt: bytes
    body: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """What the envelope names it by: SHA-256 of the salt and the canonical `[retention, body]`."""
        return digest_bytes(self.salt + canonical_json([self.retention, self.body]))


def envelope_leaf(envelope: Mapping[str, Any]) -> bytes:
    """The leaf of an envelope: a mapping of `FIELDS`.

    Raises:
        InputError: it holds what canonical JSON cannot.
    """
    return leaf_hash(canonical_json({name: envelope[name] for name in FIELDS}))


def auditable(value: Any) -> Any:
    """`value` as canonical JSON can hold it: numbers beyond it become words, tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): auditable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [auditable(item) for item in value]
    # RFC 8785 writes a whole float beyond 2^53 like an integer, which no reader may then take for one
    inexact = isinstance(value, (int, float)) and not abs(value) < _EXACT  # NaN is not smaller than anything
    return str(value) if inexact else value
