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
from posttrain.domain.ids import Role
from posttrain.server.uploads import Arriving, _blocks
from posttrain.store.operations import LEAST, PART, Parts, PartStore, forget_parts

DATA = b"0123456789" * 100_000
HALF = 600_000
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


def put(bench: ServerBench, piece: bytes, start: int, total: int = len(DATA)) -> Answer:
    headers = {"upload-offset": str(start), "upload-length": str(total)}
    return bench.ask("PATCH", PATH, KEY, piece, headers)


def test_what_another_server_was_sent_is_not_sent_again(bench: ServerBench, parts: Parts) -> None:
    parts.add(DIGEST, len(DATA), 0, DATA[:HALF])
    assert bench.ask("GET", PATH + "/state").json == {"held": False, "offset": HALF}
    assert put(bench, DATA[HALF:], HALF).json == {"held": True, "offset": len(DATA)}
    assert bench.ask("GET", PATH).body == DATA


def test_a_server_that_was_killed_after_the_last_byte_is_gone_on_from(bench: ServerBench, parts: Parts) -> None:
    parts.add(DIGEST, len(DATA), 0, DATA)
    assert bench.ask("GET", PATH + "/state").json == {"held": False, "offset": len(DATA)}
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST
    assert bench.ask("GET", PATH).body == DATA


def test_of_two_servers_that_had_all_of_it_the_slower_one_finds_it_done(bench: ServerBench, parts: Parts) -> None:
    """It saw all bytes come, and reads the parts when the quicker one has forgotten them."""
    place = PartStore(bench.workspace.blobs.url)
    slower = Arriving(bench.workspace, place)
    with pytest.raises(ConflictError, match="restarted it"):
        slower._store(DIGEST, len(DATA))
    assert put(bench, DATA, 0).json == {"held": True, "offset": len(DATA)}
    slower._store(DIGEST, len(DATA))
    assert bench.ask("GET", PATH).body == DATA


def test_what_is_stored_as_a_whole_has_no_parts_any_more(bench: ServerBench, store: PartStore) -> None:
    put(bench, DATA[:HALF], 0)
    assert [size_of(store, name) for name in store.stored()] == [HALF]
    put(bench, DATA[HALF:], HALF)
    assert store.stored() == {}


def size_of(store: PartStore, name: str) -> int:
    return sum(len(piece) for piece in store.pieces(name))


def test_of_two_that_send_the_same_part_one_is_quicker(
    bench: ServerBench, store: PartStore, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PartStore.put

    def other_first(self: PartStore, name: str, data: bytes) -> None:
        monkeypatch.undo()
        parts.add(DIGEST, len(DATA), 0, DATA[:4000])
        real(self, name, data)

    monkeypatch.setattr(PartStore, "put", other_first)
    answer = put(bench, DATA[:HALF], 0)
    assert (answer.status, answer.json["type"]) == (409, "urn:posttrain:problem:conflict")
    assert bench.ask("GET", PATH + "/state").json["offset"] == 4000
    assert len(store.stored()) == 1
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST


def test_a_part_begins_where_the_one_before_ends(store: PartStore, parts: Parts) -> None:
    with pytest.raises(ConflictError):
        parts.add(DIGEST, 100, 5, b"from nowhere")
    assert (parts.sizes(DIGEST), store.stored()) == ({}, {})


def test_parts_that_are_gone_are_sent_again(bench: ServerBench, store: PartStore) -> None:
    put(bench, DATA[:HALF], 0)
    (name,) = store.stored()
    store.drop(name)
    answer = put(bench, DATA[HALF:], HALF)
    assert (answer.status, answer.json["type"]) == (409, "urn:posttrain:problem:conflict")
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST
    assert store.stored() == {}


def test_wrong_parts_are_gone_and_may_be_sent_again(bench: ServerBench, store: PartStore) -> None:
    put(bench, b"x" * HALF, 0)
    answer = put(bench, DATA[HALF:], HALF)
    assert (answer.status, answer.json["type"]) == (422, "urn:posttrain:problem:upload")
    assert store.stored() == {}
    assert bench.ask("GET", PATH + "/state").json == {"held": False, "offset": 0}
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST


@pytest.mark.parametrize(("start", "total"), [(HALF, HALF + 5), (HALF, 2 * HALF), (0, LEAST)])
def test_whoever_names_another_size_throws_away_nothing_of_a_colleague(
    bench: ServerBench, store: PartStore, start: int, total: int
) -> None:
    put(bench, DATA[:HALF], 0)
    answer = put(bench, DATA[start:total][:HALF], start, total)
    if start:
        assert (answer.status, answer.json["type"]) == (409, "urn:posttrain:problem:conflict")
        assert f"another upload of this file declares the size {len(DATA)}" in answer.json["detail"]
    else:  # what came is not what the digest says
        assert (answer.status, answer.json["type"]) == (422, "urn:posttrain:problem:upload")
    assert bench.ask("GET", PATH + f"/state?size={len(DATA)}").json == {"held": False, "offset": HALF}
    assert len(store.stored()) == 1
    assert put(bench, DATA[HALF:], HALF).json == {"held": True, "offset": len(DATA)}
    assert bench.ask("GET", PATH).body == DATA


def test_parts_of_a_wrong_size_that_are_wrong_as_a_whole_take_no_others_with_them(
    bench: ServerBench, store: PartStore
) -> None:
    put(bench, DATA[:HALF], 0)
    assert put(bench, DATA[:LEAST], 0, 2 * LEAST).json == {"held": False, "offset": LEAST}
    assert put(bench, DATA[LEAST : 2 * LEAST], LEAST, 2 * LEAST).json["type"] == "urn:posttrain:problem:upload"
    assert len(store.stored()) == 1
    assert put(bench, DATA[HALF:], HALF).json == {"held": True, "offset": len(DATA)}


def test_an_upload_of_a_wrong_size_keeps_nobody_from_the_right_one(bench: ServerBench, store: PartStore) -> None:
    put(bench, b"x" * HALF, 0, 1 << 40)
    assert bench.ask("GET", PATH + "/state").json == {"held": False, "offset": HALF}
    assert put(bench, b"x" * HALF, HALF, 2 * HALF).status == 409
    assert Sender(Transport(bench.url, KEY), "default").put(DATA) == DIGEST
    assert store.stored() == {}, "what came under another size is not needed any more"


@pytest.mark.parametrize("size", ["", "x", "-1", "9" * 16])
def test_the_size_that_is_asked_for_is_a_number(bench: ServerBench, size: str) -> None:
    assert bench.ask("GET", PATH + f"/state?size={size}").json["type"] == "urn:posttrain:problem:input"


def test_a_request_brings_so_much_or_the_last_of_it(bench: ServerBench, store: PartStore) -> None:
    """Each request leaves a row and an object, so a file in single bytes would fill the ledger."""
    for few in (1, LEAST - 1):
        answer = put(bench, DATA[:few], 0)
        assert (answer.status, answer.json["type"]) == (422, "urn:posttrain:problem:part-size")
        assert f"at least {LEAST} bytes" in answer.json["detail"]
    assert store.stored() == {}
    assert put(bench, DATA[:LEAST], 0).json == {"held": False, "offset": LEAST}
    assert put(bench, DATA[LEAST : LEAST + 1], LEAST).json["type"] == "urn:posttrain:problem:part-size"
    assert put(bench, DATA[LEAST:-1], LEAST).json == {"held": False, "offset": len(DATA) - 1}
    assert put(bench, DATA[-1:], len(DATA) - 1).json == {"held": True, "offset": len(DATA)}
    assert bench.ask("GET", PATH).body == DATA


def test_the_command_line_sends_as_few_parts_as_it_may(
    bench: ServerBench, store: PartStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, seen = b"0123456789" * 2_000_000, list[int]()
    real = PartStore.put

    def counted(self: PartStore, name: str, piece: bytes) -> None:
        seen.append(len(piece))
        real(self, name, piece)

    monkeypatch.setattr(PartStore, "put", counted)
    assert Sender(Transport(bench.url, KEY), "default").put(data) == digest_bytes(data)
    assert seen == [PART, PART, len(data) - 2 * PART]


def test_parts_are_of_one_project(bench: ServerBench, parts: Parts) -> None:
    secret = bench.person("eve", Role.ADMIN, "other")
    parts.add(DIGEST, len(DATA), 0, DATA[:HALF])
    other = PATH.replace("/default/", "/other/")
    assert bench.ask("GET", other + "/state", secret).json == {"held": False, "offset": 0}
    put(bench, DATA[HALF:], HALF)
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


def test_wrong_bytes_give_nobody_what_another_project_has(bench: ServerBench) -> None:
    """Whoever knows a digest and sends something else under it has nothing of it."""
    bench.workspace.blobs.put(DATA)
    put(bench, b"x" * HALF, 0)
    assert put(bench, DATA[HALF:], HALF).json["type"] == "urn:posttrain:problem:upload"
    assert bench.ask("GET", PATH + "/state").json == {"held": False, "offset": 0}
    assert bench.ask("GET", PATH).status == 404


def test_an_upload_is_forgotten_when_nothing_was_added_for_long(parts: Parts, bench: ServerBench) -> None:
    ledger = bench.workspace.ledger
    parts.add(DIGEST, len(DATA), 0, DATA[:LEAST])
    between = ledger.clock.now()
    while ledger.clock.now() == between:
        pass
    parts.add(DIGEST, len(DATA), LEAST, DATA[LEAST:HALF])
    assert forget_parts(ledger, between) == [], "it goes on"
    after = ledger.clock.now() + 1.0
    gone = forget_parts(ledger, after, dry_run=True)
    assert (len(gone), parts.sizes(DIGEST)) == (2, {len(DATA): HALF})
    assert forget_parts(ledger, after) == gone
    assert parts.sizes(DIGEST) == {}


def test_an_upload_that_is_refused_at_once_is_heard_out(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces come than wait to be written, and nobody writes them."""
    monkeypatch.setattr("posttrain.server.blobs._CHUNK", 1 << 10)
    answer = put(bench, DATA, 7, 2 * len(DATA))
    assert (answer.status, answer.json["type"]) == (409, "urn:posttrain:problem:conflict")
