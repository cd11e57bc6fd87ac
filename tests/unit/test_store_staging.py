"""Files that a job elsewhere leaves: sent in parts that the store checks, listed when whole, adopted by digest."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import obstore
import pytest
from hypothesis import given, settings, strategies as st

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import IntegrityError, PosttrainError, UnavailableError
from posttrain.domain.jobs import Output
from posttrain.store import staging
from posttrain.store.attempts import AttemptFolder, mailbox_at
from posttrain.store.backends.remote import Remote
from posttrain.store.blobs import ObjectBlobs, backend_of, open_blobs
from posttrain.store.staging import StagedAttempt, StoredParts, Uploads, checkpoint_key, relayed_log
from posttrain.store.trees import tree_digest
from s3_server import s3_server, use_s3

NAME = "run-sft-1"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server("stage") as address:
        yield address


class Area:
    """An attempt's staging area, seen by its jobs and by its collector."""

    def __init__(self, root: Path, store: str, part: int, mailbox: str = "") -> None:
        self.root, self.part = root, part
        self.blobs = open_blobs(store)
        self.url = mailbox or (root / "mailbox").as_uri()
        self.attempt = StagedAttempt(root / "nothing", self.url, NAME, self.blobs.url)

    def uploads(self, epoch: int = 0) -> Uploads:
        return Uploads(StoredParts(self.blobs.url, NAME), mailbox_at(self.url), epoch)

    def folder(self, files: dict[str, bytes], name: str = "left") -> Path:
        for file, data in files.items():
            path = self.root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.root / name

    def objects(self) -> list[str]:
        store = backend_of(self.blobs.url).open()
        return sorted(str(one["path"]) for some in obstore.list(store, prefix="staging") for one in some)


@pytest.fixture(params=["folder", "s3"])
def area(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Area:
    if request.param == "folder":
        part, store = 1000, str(tmp_path / "blobs")
    else:
        use_s3(monkeypatch, request.getfixturevalue("s3"))
        part, store = 5 << 20, f"s3://stage/{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]}"
    monkeypatch.setattr(staging, "PART", part)
    return Area(tmp_path, store, part)


def some_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def test_what_is_adopted_is_what_was_left_in_parts_of_any_number(area: Area) -> None:
    """No byte, one, a whole part, and two parts and a half."""
    sizes = {"none": 0, "one": 1, "deep/er/whole": area.part, "more": area.part * 5 // 2}
    folder = area.folder({name: some_bytes(size) for name, size in sizes.items()})
    area.uploads().checkpoint(7, 90, folder)
    assert area.attempt.checkpoint_steps() == [7]
    found = area.attempt.store_checkpoint(area.blobs, 7)
    assert found is not None
    assert (found.digest, found.step, found.tokens) == (tree_digest(folder), 7, 90)
    assert area.blobs.get(digest_bytes(some_bytes(sizes["more"]))) == some_bytes(sizes["more"])
    outputs = {"model": Output("outputs/model", "tree"), "table": Output("outputs/model/more", "file")}
    (area.root / "job" / "outputs").mkdir(parents=True)
    folder = folder.rename(area.root / "job" / "outputs" / "model")
    outputs = area.uploads().outputs(AttemptFolder(area.root / "job"), outputs)
    assert area.attempt.store_output(area.blobs, "model", outputs["model"]) == tree_digest(folder)
    assert area.attempt.store_output(area.blobs, "table", outputs["table"]) == digest_bytes(some_bytes(sizes["more"]))
    with pytest.raises(IntegrityError, match="output table must be a tree, as its result states, got a file"):
        area.attempt.store_output(area.blobs, "table", Output(outputs["table"].path, "tree"))
    with pytest.raises(IntegrityError, match="output curves of run-sft-1 is not staged"):
        area.attempt.store_output(area.blobs, "curves", outputs["model"])
    with pytest.raises(IntegrityError, match=r"output model of run-sft-1 must name its list of files, got 'job.json'"):
        area.attempt.store_output(area.blobs, "model", Output("job.json", "tree"))
    (area.root / "job" / "outputs" / "model" / "more").write_bytes(b"of another incarnation")
    area.uploads(1).outputs(AttemptFolder(area.root / "job"), {"table": Output("outputs/model/more", "file")})
    assert area.attempt.store_output(area.blobs, "table", outputs["table"]) == digest_bytes(some_bytes(sizes["more"]))
    assert area.attempt.store_checkpoint(area.blobs, 8) is None


def test_a_part_with_other_bytes_is_never_adopted(area: Area) -> None:
    folder = area.folder({"weights": some_bytes(area.part * 2 + 5)})
    area.uploads().checkpoint(1, 0, folder)
    store = backend_of(area.blobs.url).open()
    obstore.put(store, area.objects()[0], some_bytes(area.part, seed=2))
    with pytest.raises(IntegrityError, match="staged file must have the digest sha256:"):
        area.attempt.store_checkpoint(area.blobs, 1)
    assert not area.blobs.has(digest_bytes(some_bytes(area.part * 2 + 5)))


def test_a_later_incarnation_sends_what_no_list_names_and_nothing_twice(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that exists without being listed may be of anybody: it is sent again, in the area of the new epoch."""
    monkeypatch.setattr(staging, "_PARTS_NOTED", 1)
    whole = some_bytes(area.part * 4)
    folder, sent = area.folder({"weights": whole}), list[str]()
    put = StoredParts.put

    def dies(self: StoredParts, key: str, data: bytes) -> None:
        if len(sent) == 2:
            raise UnavailableError("gone")
        put(self, key, data)
        sent.append(key)

    monkeypatch.setattr(staging, "_AT_ONCE", 1)
    monkeypatch.setattr(StoredParts, "put", dies)
    with pytest.raises(UnavailableError):
        area.uploads(0).checkpoint(3, 0, folder)
    assert area.attempt.checkpoint_steps() == []
    monkeypatch.setattr(StoredParts, "put", lambda self, key, data: (sent.append(key), put(self, key, data)))
    store = backend_of(area.blobs.url).open()
    unlisted = f"staging/{NAME}/1/{hashlib.sha256(whole[area.part * 3 :]).hexdigest()}"
    obstore.put(store, unlisted, b"by somebody")
    area.uploads(1).checkpoint(3, 0, folder)
    pieces = [hashlib.sha256(whole[at : at + area.part]).hexdigest() for at in range(0, len(whole), area.part)]
    assert sent == [f"0/{pieces[0]}", f"0/{pieces[1]}", f"1/{pieces[2]}", f"1/{pieces[3]}"]
    found = area.attempt.store_checkpoint(area.blobs, 3)
    assert found is not None
    assert found.digest == tree_digest(folder)


def test_of_two_jobs_of_one_attempt_the_first_list_counts(area: Area) -> None:
    first, second = (area.folder({"weights": some_bytes(50, seed)}, f"left{seed}") for seed in (1, 2))
    area.uploads().checkpoint(4, 10, first)
    area.uploads().checkpoint(4, 11, second)
    found = area.attempt.store_checkpoint(area.blobs, 4)
    assert found is not None
    assert (found.digest, found.tokens) == (tree_digest(first), 10)


def test_equal_parts_are_sent_once(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    data = some_bytes(area.part)
    uploads = area.uploads()
    uploads.checkpoint(1, 0, area.folder({"a": data * 3, "b": data}))
    assert len(area.objects()) == 1
    found = area.attempt.store_checkpoint(area.blobs, 1)
    assert found is not None
    assert area.blobs.get(digest_bytes(data * 3)) == data * 3


def test_a_list_adopts_nothing_whose_bytes_are_not_staged(area: Area) -> None:
    """Another project's artifact is in the store; its digest alone is no reason to have it."""
    theirs = area.blobs.put(b"of another project")
    for listed in ({"digest": theirs, "size": 0, "parts": []}, {"digest": theirs, "size": 18, "parts": [f"0/{HEX}"]}):
        mailbox_at(area.url).replace(checkpoint_key(1), {"step": 1, "tokens": 0, "files": {"weights": listed}})
        with pytest.raises(IntegrityError):
            area.attempt.store_checkpoint(area.blobs, 1)
    assert area.blobs.get(theirs) == b"of another project"


def test_a_log_is_read_whole_however_its_pieces_and_characters_fall(tmp_path: Path) -> None:
    mailbox, text = mailbox_at((tmp_path / "mail").as_uri()), "grüße 😀 €\n" * 7
    data, at = text.encode(), 0
    rng = random.Random(4)
    while at < len(data):
        at += mailbox.log(at, data[at : at + rng.randint(1, 5)])
    assert mailbox.log(0, b"other words") < 6, "what is there stays"
    found, cursor = "", 0
    while (page := relayed_log(mailbox, cursor)).cursor > cursor:
        found, cursor = found + page.text, page.cursor
    assert found == text


HEX = "0" * 64
LISTS = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from([f"0/{HEX}", f"../{HEX}", f"sha256:{HEX}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["files", "tokens", "digest", "size", "parts", "../x", "model"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(value=st.dictionaries(st.sampled_from(["files", "tokens", "step"]), LISTS, max_size=3))
@settings(max_examples=60, deadline=None)
def test_no_list_that_a_job_writes_does_more_than_be_refused(
    value: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever it says, nothing outside the attempt's area is read, and the error is the collector's usual one."""
    root = tmp_path_factory.mktemp("lists")
    area = Area(root, str(root / "blobs"), 1000)
    read = list[str]()
    pieces = ObjectBlobs.adopt

    def adopting(self: ObjectBlobs, digest: str, keys: list[str], size: int) -> str:
        read.extend(keys)
        return pieces(self, digest, keys, size)

    ObjectBlobs.adopt = adopting  # type: ignore[method-assign]
    try:
        path = root / "mailbox" / checkpoint_key(2)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(value))
        with suppress(PosttrainError):
            assert area.attempt.store_checkpoint(area.blobs, 2) is None or value["files"] == {}
    finally:
        ObjectBlobs.adopt = pieces  # type: ignore[method-assign]
    assert all(key.startswith(f"staging/{NAME}/") and ".." not in key for key in read)


@pytest.mark.parametrize(
    "listed",
    [
        {"digest": "sha256:1", "size": 1, "parts": [f"0/{HEX}"]},
        {"digest": f"sha256:{HEX}", "size": 1, "parts": [f"0/../../../sha256/{HEX}"]},
        {"digest": f"sha256:{HEX}", "size": -1, "parts": []},
    ],
)
def test_a_list_names_only_parts_of_its_attempt(area: Area, listed: dict[str, object]) -> None:
    mailbox_at(area.url).once(checkpoint_key(1), {"step": 1, "tokens": 0, "files": {"weights": listed}})
    with pytest.raises(PosttrainError):
        area.attempt.store_checkpoint(area.blobs, 1)


def test_every_write_states_its_checksum_and_a_copy_within_s3_reads_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str
) -> None:
    use_s3(monkeypatch, s3)
    monkeypatch.setattr(staging, "PART", 5 << 20)
    area = Area(tmp_path, "s3://stage/copied", 5 << 20)
    whole = some_bytes((5 << 20) * 2 + 9)
    area.uploads().checkpoint(1, 0, area.folder({"weights": whole}))
    heads = [obstore.head(backend_of(area.blobs.url).open(), key) for key in area.objects()]
    assert sum(int(head["size"]) for head in heads) == len(whole)
    wrote: Callable[..., None] = Remote.write
    monkeypatch.setattr(Remote, "write", lambda *_: pytest.fail("its bytes were sent by this process"))
    found = area.attempt.store_checkpoint(area.blobs, 1)
    monkeypatch.setattr(Remote, "write", wrote)
    assert found is not None
    assert area.blobs.check(digest_bytes(whole)) == len(whole)
