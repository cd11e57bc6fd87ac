"""The Merkle tree against RFC 6962's own definition, written a second time and recursively."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given, settings, strategies as st

from posttrain.store.trees import EMPTY, Tree, leaf_hash, node_hash


def defined(leaves: Sequence[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1: split at the largest power of two below n."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\x01" + defined(leaves[:half]) + defined(leaves[half:])).digest()


def some(count: int) -> list[bytes]:
    return [leaf_hash(str(number).encode()) for number in range(count)]


def test_the_hashes_are_those_that_other_logs_use() -> None:
    assert EMPTY.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert leaf_hash(b"").hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert node_hash(leaf_hash(b""), leaf_hash(b"\x00")).hex() == (
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6))
def test_a_tree_that_grows_has_the_root_of_all_its_leaves(batches: list[int]) -> None:
    leaves, tree = some(sum(batches)), Tree()
    placed = 0
    for count in batches:
        tree = Tree.of(tree.size, tree.packed)  # as the next sealer finds it
        tree.add(leaves[placed : placed + count])
        placed += count
        assert tree.root == defined(leaves[:placed])


def test_tiles_are_the_roots_of_whole_blocks() -> None:
    leaves = some(256 * 257 + 3)
    tiles = Tree().add(leaves)
    low = [tile for tile in tiles if tile.level == 0]
    assert [tile.position for tile in low] == list(range(257))
    assert [tile.hash for tile in low[:2]] == [defined(leaves[:256]), defined(leaves[256:512])]
    (high,) = (tile for tile in tiles if tile.level == 1)
    assert (high.position, high.hash) == (0, defined(leaves[: 256 * 256]))
