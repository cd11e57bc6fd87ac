"""A workspace on S3 that is served: large files go their own way, and a store in trouble is told and waited out."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import obstore
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from server_bench import KEY, ServerBench, served

from hostile_proxy import BUSY, GONE, HALF, SILENT, WRONG, HostileProxy, hostile_proxy
from posttrain.api.codec import MEDIA_TYPE, TYPE
from posttrain.client.blobs import Fetcher, Sender
from posttrain.client.transport import Transport, sent
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import IntegrityError, UnavailableError
from posttrain.domain.ids import Role
from posttrain.store import direct as signing
from posttrain.store.backends.remote import Remote
from posttrain.store.direct import LARGE, open_direct
from posttrain.store.operations import PartStore
from posttrain.store.signed import Keys, presigned
from s3_server import KEYS, s3_server, use_s3

BIG = LARGE * 2 + 4321


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server("artifacts") as address:
        yield address


@pytest.fixture
def proxy(s3: str) -> Iterator[HostileProxy]:
    with hostile_proxy(s3) as made:
        yield made


@pytest.fixture
def bench(tmp_path: Path, proxy: HostileProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerBench]:
    use_s3(monkeypatch, proxy.url)
    monkeypatch.setenv("POSTTRAIN_STORE", f"s3://artifacts/{uuid.uuid4()}")
    with served(tmp_path / "served") as made:
        made.person("ann", Role.SUBMITTER)
        yield made


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(os.urandom(BIG))
    return path


def sender(bench: ServerBench, project: str = "default") -> Sender:
    return Sender(Transport(bench.url, bench.tokens["ann"]), project)


class Asking(Transport):
    """Counts what it asks the server."""

    asked = 0

    def _once(self, *words: Any, **options: Any) -> Any:
        self.asked += 1
        return super()._once(*words, **options)


def blob_path(digest: str, project: str = "default") -> str:
    return f"/v1/projects/{project}/blobs/{digest}"


def fetched(bench: ServerBench, digest: str, folder: Path, token: str = KEY) -> bytes:
    made = Fetcher(Transport(bench.url, token), "default").fetch({"it": {"digest": digest, "bytes": 0}}, folder)
    return made["it"].read_bytes()


def of_the_store(proxy: HostileProxy, method: str) -> list[str]:
    return [path for asked, path, _ in proxy.seen if asked == method]


# --- the direct way ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_files_go_directly_and_small_ones_through_the_server(
    bench: ServerBench, proxy: HostileProxy, big: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    digest = sender(bench).put_file(big)
    [(_, path, headers)] = [one for one in proxy.seen if one[0] == "PUT" and "X-Amz-Signature" in one[1]]
    signed = parse_qs(urlsplit(path).query)["X-Amz-SignedHeaders"][0].split(";")
    assert signed == ["content-length", "host", "x-amz-checksum-sha256"]
    assert headers["content-length"] == str(BIG)
    assert base64.b64decode(headers["x-amz-checksum-sha256"]) == hashlib.sha256(big.read_bytes()).digest()
    assert "authorization" not in headers
    assert bench.workspace.blobs.get(digest) == big.read_bytes()
    assert list(PartStore(bench.workspace.blobs.url).stored()) == []
    proxy.seen.clear()
    (tmp_path / "out").mkdir()
    assert fetched(bench, digest, tmp_path / "out") == big.read_bytes()
    [direct] = [one for one in proxy.seen if "X-Amz-Signature" in one[1]]
    assert direct[0] == "GET"
    assert "authorization" not in direct[2]
    proxy.seen.clear()
    small = sender(bench).put(b"small")
    assert fetched(bench, small, tmp_path / "out") == b"small"
    assert not [one for one in proxy.seen if "X-Amz-Signature" in one[1]]
    said = capfd.readouterr()
    assert "Signature" not in said.out + said.err
    assert KEYS["SECRET_ACCESS_KEY"] not in said.out + said.err


@pytest.mark.slow
@pytest.mark.parametrize("how", [BUSY, *(pytest.param(how, marks=pytest.mark.slow) for how in (GONE, HALF))])
def test_where_the_direct_way_fails_the_server_is_asked_and_that_is_said(
    bench: ServerBench, proxy: HostileProxy, big: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    if how != HALF:  # of a PUT, what is cut off is only its answer
        proxy.ill(how, "PUT", "X-Amz-Signature")
    digest = sender(bench).put_file(big)
    assert bench.workspace.blobs.get(digest) == big.read_bytes()
    proxy.ill(how, "GET", "X-Amz-Signature")
    assert fetched(bench, digest, tmp_path) == big.read_bytes()
    said = capfd.readouterr().err
    assert said.count("cannot be used from this machine") == (1 if how == HALF else 2)
    assert "X-Amz" not in said


@pytest.mark.slow
def test_wrong_bytes_that_were_sent_directly_become_no_blob(bench: ServerBench, tmp_path: Path) -> None:
    data, token = os.urandom(BIG), bench.tokens["ann"]
    digest = digest_bytes(data)
    ticket = bench.ask("POST", blob_path(digest) + "/direct", token, {"size": BIG}).json
    for lie in (b"x" * BIG, data[:-1]):
        (tmp_path / "lie").write_bytes(lie)
        sent(ticket["url"], {**ticket["headers"], "content-length": str(len(lie))}, tmp_path / "lie")
        answer = bench.ask("POST", blob_path(digest) + "/arrived", token, {"size": BIG})
        assert (answer.status, answer.json["type"]) == (422, TYPE + "upload")
        assert bench.ask("GET", blob_path(digest) + "/state", token).json == {"held": False, "offset": 0}
        assert not bench.workspace.blobs.has(digest)
        again = bench.ask("POST", blob_path(digest) + "/arrived", token, {"size": BIG})
        assert again.json["type"] == TYPE + "not-found"  # nothing of the lie is left
    (tmp_path / "truth").write_bytes(data)
    sent(ticket["url"], ticket["headers"], tmp_path / "truth")
    for _ in range(2):  # also when its first answer was lost
        assert bench.ask("POST", blob_path(digest) + "/arrived", token, {"size": BIG}).json["held"]
    assert bench.workspace.blobs.get(digest) == data


@pytest.mark.slow
def test_a_copy_within_the_store_may_take_as_long_as_its_size_needs(
    bench: ServerBench, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 answers when it has copied; that it copies as fast as is counted on, moto cannot show."""
    allowed: list[str] = []
    real = obstore.copy

    def copied(store: Any, source: str, target: str) -> None:
        allowed.append(store.client_options["timeout"])
        real(store, source, target)

    monkeypatch.setattr(obstore, "copy", copied)
    sender(bench).put_file(big)
    assert allowed == ["31s 258us"] * 2  # 30 seconds, and 1 for each 16 MiB
    with pytest.raises(FileNotFoundError):
        Remote("s3://artifacts").copy("a", "b", 5 << 30)
    assert allowed[2] == "5m 50s"


@pytest.mark.slow
def test_what_another_project_sent_is_not_had_by_saying_that_it_arrived(bench: ServerBench, big: Path) -> None:
    other = bench.person("eve", Role.ADMIN, "other")
    digest = sender(bench).put_file(big)
    answer = bench.ask("POST", blob_path(digest, "other") + "/arrived", other, {"size": BIG})
    assert answer.json["type"] == TYPE + "not-found"
    assert not bench.ask("GET", blob_path(digest, "other") + "/state", other).json["held"]
    assert bench.ask("GET", blob_path(digest, "other") + "?direct=yes", other).status == 404
    viewer = bench.person("vera", Role.VIEWER)
    assert bench.ask("POST", blob_path(digest) + "/direct", viewer, {"size": BIG}).status == 403
    assert bench.ask("GET", blob_path(digest) + "?direct=yes", viewer).status == 403
    assert bench.ask("GET", blob_path(digest) + "?direct=yes", "posttrain_" + "x" * 43).status == 401


@pytest.mark.parametrize("body", [b"", b"[]", b'{"size": -1}', b'{"size": "9"}', b'{"size": true}', b"x" * 5000])
def test_a_size_that_is_none_is_refused(bench: ServerBench, body: bytes) -> None:
    answer = bench.ask("POST", blob_path("sha256:" + "0" * 64) + "/direct", bench.tokens["ann"], body)
    assert (answer.status, answer.headers["content-type"]) == (422, MEDIA_TYPE)


@pytest.mark.parametrize("session", ["", "a/session+token=="])
def test_urls_are_signed_as_aws_signs_them(monkeypatch: pytest.MonkeyPatch, session: str) -> None:
    keys = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", session, "eu-west-3")
    url, headers = (
        "https://s3.eu-west-3.amazonaws.com/bucket/a/b%20c",
        {"content-length": "5", "x-amz-checksum-sha256": "=="},
    )
    request = AWSRequest("PUT", url, headers=headers)
    S3SigV4QueryAuth(Credentials(keys.access, keys.secret, session or None), "s3", "eu-west-3", 900).add_auth(request)
    at = time.mktime(time.strptime(parse_qs(urlsplit(request.url).query)["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ"))
    mine = presigned(keys, "PUT", url, 900, headers=headers, now=at - time.timezone)
    assert parse_qs(urlsplit(mine).query) == parse_qs(urlsplit(request.url).query)
    assert keys.secret not in repr(keys)
    assert signing.Keys("a", "b") != keys


# --- outages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [GONE, BUSY])
def test_a_store_that_is_away_is_a_503_and_everything_goes_on_afterwards(
    bench: ServerBench, proxy: HostileProxy, how: str, tmp_path: Path
) -> None:
    token, data, half = bench.tokens["ann"], os.urandom(1_000_000), 600_000
    digest, there = digest_bytes(data), sender(bench).put(b"there")
    first, rest = ({"upload-offset": start, "upload-length": str(len(data))} for start in ("0", str(half)))
    assert bench.ask("PATCH", blob_path(digest), token, data[:half], first).json["offset"] == half
    proxy.ill(how)
    for answer in (
        bench.ask("PATCH", blob_path(digest), token, data[half:], rest),
        bench.ask("GET", blob_path(there), KEY),
    ):
        assert (answer.status, answer.headers["content-type"]) == (503, MEDIA_TYPE), answer.body
        assert answer.json["type"] == TYPE + "unavailable"
        assert answer.json["retryable"]
        assert int(answer.headers["retry-after"]) > 0
        assert KEYS["SECRET_ACCESS_KEY"] not in answer.body.decode()
    assert bench.ask("GET", "/v1/projects/default/whoami", token).status == 200
    assert bench.ask("GET", "/v1/projects/default/runs", token).status == 200
    proxy.heal()
    assert bench.ask("GET", blob_path(digest) + "/state", token).json == {"held": False, "offset": half}
    assert sender(bench).put(data) == digest  # it goes on there
    assert bench.workspace.blobs.get(digest) == data
    assert bench.ask("GET", blob_path(there), KEY).body == b"there"


def test_a_client_waits_for_a_store_that_comes_back(
    bench: ServerBench, proxy: HostileProxy, capfd: pytest.CaptureFixture[str]
) -> None:
    data, transport = os.urandom(100_000), Asking(bench.url, bench.tokens["ann"])
    proxy.fault = lambda _method, _path: GONE if transport.asked < 6 else "well"  # a person is told after four
    assert Sender(transport, "default").put(data) == digest_bytes(data)
    assert bench.workspace.blobs.get(digest_bytes(data)) == data
    assert "does not answer" in capfd.readouterr().err


@pytest.mark.parametrize("how", [HALF, WRONG])
def test_half_an_answer_and_wrong_bytes_reach_nobody(
    bench: ServerBench, proxy: HostileProxy, how: str, tmp_path: Path
) -> None:
    data = os.urandom(300_000)
    digest = sender(bench).put(data)
    proxy.ill(how, "GET")
    with pytest.raises((UnavailableError, IntegrityError)):
        bench.workspace.blobs.get(digest)
    connection = http.client.HTTPConnection("127.0.0.1", bench.port, timeout=300)
    connection.request("GET", blob_path(digest), headers={"authorization": f"Bearer {KEY}"})
    try:
        found = connection.getresponse().read()
    except (http.client.HTTPException, ConnectionError):
        found = b""
    assert found != data
    connection.close()
    proxy.heal()
    assert fetched(bench, digest, tmp_path) == data


@pytest.mark.slow
def test_an_upload_that_breaks_off_leaves_nothing_begun(bench: ServerBench, proxy: HostileProxy, big: Path) -> None:
    direct = open_direct(bench.workspace.blobs.url)
    assert direct is not None
    proxy.ill(BUSY, "PUT", "partNumber=2")
    with pytest.raises(UnavailableError, match="does not answer"):
        bench.workspace.blobs.put_file(big)
    assert direct.unfinished(time.time() + 60) == []
    assert not bench.workspace.blobs.has(digest_bytes(big.read_bytes()))
    proxy.heal()
    assert bench.workspace.blobs.get(bench.workspace.blobs.put_file(big)) == big.read_bytes()


@pytest.mark.slow
def test_a_store_that_is_silent_keeps_nobody_for_ever(bench: ServerBench, proxy: HostileProxy) -> None:
    there, token = sender(bench).put(b"there"), bench.tokens["ann"]
    proxy.ill(SILENT)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(bench.ask("GET", blob_path(there), KEY).status))
        for _ in range(40)
    ]
    for thread in threads:
        thread.start()
    assert bench.ask("GET", "/v1/projects/default/whoami", token).status == 200  # while all of them wait
    for thread in threads:
        thread.join()
    assert set(answers) == {503}
    proxy.heal()
    assert bench.ask("GET", blob_path(there), KEY).body == b"there"


@pytest.mark.slow
def test_nothing_of_it_is_in_the_folder_of_the_workspace(bench: ServerBench, big: Path) -> None:
    sender(bench).put_file(big)
    for path in bench.workspace.root.rglob("*"):
        if path.is_file():
            assert KEYS["SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path
            assert b"X-Amz-Signature" not in path.read_bytes(), path
    assert json.loads((bench.workspace.root / "workspace.json").read_text())["store"].startswith("s3://artifacts/")
