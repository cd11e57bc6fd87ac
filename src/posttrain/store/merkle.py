"""The Merkle tree of RFC 6962, grown leaf by leaf: pure hashing.

`leaf = SHA-256(0x00 || entry)`, `node = SHA-256(0x01 || left || right)`. A tree of n leaves is kept as the roots of its
perfect subtrees, one for each bit of n, the largest first. Whenever 256, 256², … leaves are complete, their root is a
*tile*, so that proofs need not hash everything again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

HASH = 32  # bytes
EMPTY = hashlib.sha256(b"").digest()  # root of no leaves
LEVELS = 8  # levels of the binary tree that a tile spans: 256 leaves


@dataclass(frozen=True, slots=True)
class Tile:
    """Root over the `position`-th 256^(level + 1) leaves."""

    level: int
    position: int
    hash: bytes


@dataclass(slots=True)
class Tree:
    """A tree that grows."""

    size: int = 0
    peaks: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, size: int, peaks: bytes) -> Tree:
        """A tree as `packed` left it."""
        return cls(size, [peaks[at : at + HASH] for at in range(0, len(peaks), HASH)])

    @property
    def packed(self) -> bytes:
        """The peaks as they are stored."""
        return b"".join(self.peaks)

    def add(self, leaves: Iterable[bytes]) -> list[Tile]:
        """Append leaf hashes.

        Returns:
            The tiles that they completed, in order.
        """
        tiles: list[Tile] = []
        for leaf in leaves:
            node, size, level = leaf, self.size, 0
            while size & 1:
                node = node_hash(self.peaks.pop(), node)
                size >>= 1
                level += 1
                if level % LEVELS == 0:
                    tiles.append(Tile(level // LEVELS - 1, size, node))
            self.peaks.append(node)
            self.size += 1
        return tiles

    @property
    def root(self) -> bytes:
        """RFC 6962's Merkle tree hash of all leaves."""
        if not self.peaks:
            return EMPTY
        found = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            found = node_hash(peak, found)
        return found


def leaf_hash(entry: bytes) -> bytes:
    """RFC 6962's hash of an entry."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """RFC 6962's hash of two subtrees."""
    return hashlib.sha256(b"\x01" + left + right).digest()
