"""What a server's job on another machine begins with: a token that redeems another, and opens nothing itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from server_bench import ServerBench, attempt_with_access, granting, served, serving

from posttrain.app.workspace import init_workspace
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import InfrastructureError, IntegrityError, NotFoundError, UnavailableError
from posttrain.domain.ids import Role
from posttrain.domain.lifecycle import AttemptState
from posttrain.store import staging
from posttrain.store.backends.served import ServedBlobs
from posttrain.store.blobs import backend_of
from posttrain.store.direct import LARGE, Direct
from posttrain.store.grants import BOOTSTRAP_PREFIX, SECONDS
from posttrain.store.retries import PARTS, REDEEM, Bootstrap, RefusedError, read_access
from posttrain.store.staging import ServedParts
from s3_server import s3_server, use_s3


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path / "served") as made:
        made.person("root", Role.ADMIN)
        yield made


class Remote:
    """An attempt whose job runs elsewhere, as its server and its agent see it."""

    def __init__(self, bench: ServerBench, folder: Path, name: str = "far") -> None:
        self.bench, self.folder = bench, folder
        made = attempt_with_access(bench, name)
        self.attempt, self.inputs, self.old = made.attempt, made.inputs, read_access(made.folder)
        self.boot = Bootstrap.from_json(granting(bench).bootstrap(made.attempt))

    def redeem(self, name: str = "access") -> str:
        """As an agent does at its start; the token."""
        (self.folder / name).mkdir(exist_ok=True)
        self.boot.redeem(self.folder / name, patience=0.0)
        self.boot.settle(self.folder / name)
        found = read_access(self.folder / name)
        assert found is not None
        return found.token

    def status(self, token: str, path: str = "", method: str = "GET", body: bytes | None = None) -> int:
        return self.bench.ask(method, path or f"/v1/attempt/blobs/{self.inputs['data']}", token, body).status

    def end(self) -> None:
        with self.bench.workspace.ledger.transaction(self.bench.workspace.actor) as transaction:
            launched = transaction.update_attempt(self.attempt, state=AttemptState.LAUNCHED)
            transaction.update_attempt(launched, state=AttemptState.FAILED)


def key_of(data: bytes, epoch: int = 0) -> str:
    return f"{epoch}/{hashlib.sha256(data).hexdigest()}"


def test_each_redemption_revokes_what_the_former_incarnation_has(bench: ServerBench, tmp_path: Path) -> None:
    mine = Remote(bench, tmp_path)
    assert mine.old is not None
    first = mine.redeem()
    assert (mine.status(first), mine.status(mine.old.token)) == (200, 401)
    second = mine.redeem("second")
    assert (mine.status(second), mine.status(first)) == (200, 401)
    assert ServedBlobs(tmp_path / "second", 0.0, lambda _: None).get(mine.inputs["data"]) == b"rows of far"
    with pytest.raises(RefusedError, match="the server rejects this attempt"):
        ServedBlobs(tmp_path / "access", 0.0, lambda _: None).get(mine.inputs["data"])
    mine.end()
    assert mine.status(second) == 401
    with pytest.raises(RefusedError):
        mine.redeem("third")


def test_a_duplicate_that_does_not_begin_takes_nothing_from_the_job_that_runs(
    bench: ServerBench, tmp_path: Path
) -> None:
    mine = Remote(bench, tmp_path)
    token = mine.redeem()
    (tmp_path / "duplicate").mkdir()
    mine.boot.redeem(tmp_path / "duplicate", patience=0.0)
    assert mine.status(token) == 200


def test_neither_token_does_what_the_other_does(bench: ServerBench, tmp_path: Path) -> None:
    mine, other = Remote(bench, tmp_path), Remote(bench, tmp_path, "other")
    boot, token = mine.boot.token, mine.redeem()
    assert boot.startswith(BOOTSTRAP_PREFIX)
    assert mine.status(boot) == 401
    assert mine.status(boot, f"{PARTS}/{key_of(b'x')}", "PUT", b"x") == 401
    for wrong in ("", f"{BOOTSTRAP_PREFIX}{'x' * 43}", bench.tokens["root"]):
        assert mine.status(wrong, REDEEM, "POST") == 401
    assert mine.status(other.redeem("other"), REDEEM, "POST") == 204, "its own attempt's"
    assert mine.status(token) == 200, "a refused redemption revokes nothing"
    assert mine.status(other.redeem("again")) == 404, "these are no inputs of its own"
    assert boot not in repr(mine.boot)


def test_what_an_attempt_wrote_counts_over_its_incarnations(bench: ServerBench, tmp_path: Path) -> None:
    mine = Remote(bench, tmp_path)
    grants = granting(bench)._grants
    assert grants.count(digest_bytes(mine.redeem().encode()), 100, 150)
    assert not grants.count(digest_bytes(mine.redeem("second").encode()), 100, 150)


def test_a_grant_of_a_job_elsewhere_is_renewed_by_any_server(bench: ServerBench, tmp_path: Path) -> None:
    """Its attempt belongs to no host; a server that has not its folder writes nothing there."""
    mine = Remote(bench, tmp_path)
    token = mine.redeem()
    grants = granting(bench)._grants
    with bench.workspace.ledger.database.write(across="a test") as connection:
        connection.exec_driver_sql("UPDATE grants SET expires_at = expires_at - ?", (SECONDS - 5,))
    assert mine.attempt.folder in grants.renew("some host")
    with bench.workspace.ledger.database.write(across="a test") as connection:
        connection.exec_driver_sql("UPDATE grants SET expires_at = expires_at - ?", (SECONDS - 5,))
    assert mine.status(token) == 200


def test_a_part_arrives_whole_or_not_at_all(bench: ServerBench, tmp_path: Path) -> None:
    mine = Remote(bench, tmp_path)
    token, data = mine.redeem(), b"weights" * 100
    ServedParts(tmp_path / "access", 0.0, lambda _: None).put(key_of(data), data)
    store = backend_of(bench.workspace.blobs.url)
    name = f"staging/far-aaaaaaaa-sft-1/{key_of(data)}"
    assert b"".join(store.pieces(store.open(), name)) == data
    assert ServedParts(tmp_path / "access", 0.0, lambda _: None).get(key_of(data)) == data
    with pytest.raises(NotFoundError):
        ServedParts(tmp_path / "access", 0.0, lambda _: None).get(key_of(b"other"))
    assert mine.status(token, f"{PARTS}/{key_of(data)}?size=abc", "POST") == 204
    for path, body in (
        (key_of(data), b"other bytes"),
        (f"0/../../sha256/{'0' * 64}", data),
        (f"x/{'0' * 64}", data),
        (f"0/{'0' * 63}", data),
        ("", data),
    ):
        assert mine.status(token, f"{PARTS}/{path}", "PUT", body) in (404, 405, 422), path
    assert b"".join(store.pieces(store.open(), name)) == data
    assert mine.status(token, f"{PARTS}/{key_of(data)}", "PUT", b"x" * (staging.PART + 1)) in (413, 422)


def test_a_large_part_goes_to_the_store_with_a_url_that_fixes_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server("artifacts") as address:
        use_s3(monkeypatch, address)
        monkeypatch.setenv("POSTTRAIN_STORE", "s3://artifacts/team")
        with serving(init_workspace(tmp_path / "served")) as bench:
            bench.person("root", Role.ADMIN)
            mine = Remote(bench, tmp_path)
            mine.redeem()
            data = b"w" * LARGE
            monkeypatch.setattr(staging.StoredParts, "put", lambda *_: pytest.fail("it went through the server"))
            parts = ServedParts(tmp_path / "access", 0.0, lambda _: None)
            parts.put(key_of(data), data)
            store = backend_of(bench.workspace.blobs.url)
            name = f"staging/far-aaaaaaaa-sft-1/{key_of(data)}"
            assert b"".join(store.pieces(store.open(), name)) == data
            ticket = Direct(bench.workspace.blobs.url).part(name, LARGE)
            assert ticket is not None
            signed = parse_qs(urlsplit(ticket.url).query)["X-Amz-SignedHeaders"]
            assert signed == ["content-length;host;x-amz-checksum-sha256"], "S3 compares both with what arrives"


def test_a_team_is_tried_server_by_server(bench: ServerBench, tmp_path: Path) -> None:
    mine = Remote(bench, tmp_path)
    boot = Bootstrap(mine.boot.token, ("http://127.0.0.1:9", bench.url))
    (tmp_path / "job").mkdir()
    boot.redeem(tmp_path / "job", patience=30.0)
    found = read_access(tmp_path / "job")
    assert found is not None
    assert found.url == bench.url
    boot.turn(tmp_path / "job")
    moved = read_access(tmp_path / "job")
    assert moved is not None
    assert (moved.url, moved.token) == ("http://127.0.0.1:9", found.token)
    with pytest.raises(UnavailableError, match="check that the node can reach it"):
        Bootstrap(mine.boot.token, ("http://127.0.0.1:9",)).redeem(tmp_path / "job", patience=0.0)
    assert issubclass(RefusedError, InfrastructureError)
    with pytest.raises(IntegrityError, match="POSTTRAIN_BOOTSTRAP cannot be read"):
        Bootstrap.from_json("{}")
