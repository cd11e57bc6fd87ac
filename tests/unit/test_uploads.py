"""Halves of uploads lie in the store, in parts that any server of the ledger goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_bench import KEY, Answer, ServerBench, served

from posttrain.client.blobs import Sender
from posttrain.client.transport import Transport
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import ConflictError, DeadlineError, InputError
from posttrain.domain.roles import Role
from posttrain.server.uploads import Arriving, _blocks
from posttrain.store.parts import PART, Parts, PartStore

DATA = b"0123456789" * 1000
DIGEST = digest_bytes(DATA)
PATH = "/v1/projects/default/blobs/" + DIGEST


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path / "served") as made:
        made.person("ann", Role.ADMIN)
        yield made


@pytest.fixture
def store(bench: ServerBench) -> PartStore:
    return PartStore(bench.workspace.blobs.url)


@pytest.fixture
def parts(bench: ServerBench, store: PartStore) -> Parts:
    return Parts(bench.workspace.ledger, store)


def put(bench: ServerBench, piece: bytes, start: int) -> Answer:
    headers = {"upload-offset": str(start), "upload-length": str(len(DATA))}
    return bench.ask("PATCH", PATH, KEY, piece, headers)


def test_what_another_server_was_sent_is_not_sent_again(bench: ServerBench, parts: Parts) -> None:
    parts.add(DIGEST, 0, DATA[:6000])
    assert bench.ask("GET", PATH + "/state").json == {"held": False, "offset": 6000}
    assert put(bench, DATA[6000:], 6000).json == {"held": True, "offset": len(DATA)}
    assert bench.ask("GET", PATH).body == DATA


def test_a_server_that_was_killed_after_the_last_byte_is_gone_on_from(bench: ServerBench, parts: Parts) -> None:
    parts.add(DIGEST, 0, DATA)
    assert bench.ask("GET", PATH + "/state").json == {"held": False, "offset": len(DATA)}
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST
    assert bench.ask("GET", PATH).body == DATA


def test_of_two_servers_that_had_all_of_it_the_slower_one_finds_it_done(bench: ServerBench, parts: Parts) -> None:
    """It saw all bytes come, and reads the parts when the quicker one has forgotten them."""
    place = PartStore(bench.workspace.blobs.url)
    slower = Arriving(bench.workspace, place)
    with pytest.raises(ConflictError, match="began it again"):
        slower._store(DIGEST, len(DATA))
    assert put(bench, DATA, 0).json == {"held": True, "offset": len(DATA)}
    slower._store(DIGEST, len(DATA))
    assert bench.ask("GET", PATH).body == DATA


def test_what_is_stored_as_a_whole_has_no_parts_any_more(bench: ServerBench, store: PartStore) -> None:
    put(bench, DATA[:10], 0)
    assert [size_of(store, name) for name in store.stored()] == [10]
    put(bench, DATA[10:], 10)
    assert store.stored() == {}


def size_of(store: PartStore, name: str) -> int:
    return sum(len(piece) for piece in store.pieces(name))


def test_of_two_that_send_the_same_part_one_is_quicker(
    bench: ServerBench, store: PartStore, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PartStore.put

    def other_first(self: PartStore, name: str, data: bytes) -> None:
        monkeypatch.undo()
        parts.add(DIGEST, 0, DATA[:4000])
        real(self, name, data)

    monkeypatch.setattr(PartStore, "put", other_first)
    answer = put(bench, DATA[:5000], 0)
    assert (answer.status, answer.json["type"]) == (409, "urn:posttrain:problem:conflict")
    assert bench.ask("GET", PATH + "/state").json["offset"] == 4000
    assert len(store.stored()) == 1
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST


def test_a_part_begins_where_the_one_before_ends(store: PartStore, parts: Parts) -> None:
    with pytest.raises(ConflictError):
        parts.add(DIGEST, 5, b"from nowhere")
    assert (parts.size(DIGEST), store.stored()) == (0, {})


def test_parts_that_are_gone_are_sent_again(bench: ServerBench, store: PartStore) -> None:
    put(bench, DATA[:6000], 0)
    (name,) = store.stored()
    store.drop(name)
    answer = put(bench, DATA[6000:], 6000)
    assert (answer.status, answer.json["type"]) == (409, "urn:posttrain:problem:conflict")
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST
    assert store.stored() == {}


def test_wrong_parts_are_gone_and_may_be_sent_again(bench: ServerBench, store: PartStore) -> None:
    put(bench, b"x" * 6000, 0)
    answer = put(bench, DATA[6000:], 6000)
    assert (answer.status, answer.json["type"]) == (422, "urn:posttrain:problem:upload")
    assert store.stored() == {}
    assert bench.ask("GET", PATH + "/state").json == {"held": False, "offset": 0}
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST


def test_parts_are_of_one_project(bench: ServerBench, parts: Parts) -> None:
    secret = bench.person("eve", Role.ADMIN, "other")
    parts.add(DIGEST, 0, DATA[:6000])
    other = PATH.replace("/default/", "/other/")
    assert bench.ask("GET", other + "/state", secret).json == {"held": False, "offset": 0}
    put(bench, DATA[6000:], 6000)
    assert bench.ask("GET", other + "/state", secret).json == {"held": False, "offset": 0}
    assert bench.ask("GET", other, secret).status == 404


def test_what_comes_is_cut_into_parts_and_kept_where_it_stops() -> None:
    pieces = [b"a" * (PART - 1), b"b", b"c" * 10]
    assert [len(one) for one in _blocks(pieces, PART + 10, "x")] == [PART, 10]

    def stalled() -> Iterator[bytes]:
        yield b"a" * 7
        raise DeadlineError("nothing comes")

    found = _blocks(stalled(), 100, "x")
    assert next(found) == b"a" * 7
    with pytest.raises(DeadlineError):
        next(found)
    with pytest.raises(InputError):
        list(_blocks([b"a" * 5], 4, "x"))
