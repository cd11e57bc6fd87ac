"""A store that cannot be used is told at once: by `init`, which makes nothing, and by a server as it begins."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hostile_proxy import GONE, HostileProxy, hostile_proxy
from posttrain.cli.main import app
from posttrain.server.service import StoreLook
from posttrain.store.blobs import open_blobs
from s3_server import s3_server, use_s3


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server("artifacts") as address:
        yield address


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileProxy]:
    with hostile_proxy(s3) as made:
        use_s3(monkeypatch, made.url)
        yield made


def init(folder: Path, monkeypatch: pytest.MonkeyPatch, store: str, *words: str) -> str:
    """What `init` says; it refuses, and leaves nothing."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("POSTTRAIN_WORKSPACE", raising=False)
    monkeypatch.setenv("POSTTRAIN_STORE", store)
    result = CliRunner().invoke(app, ["init", *words])
    assert result.exit_code, result.output
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(folder.iterdir()) == []
    return result.stderr


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("value", ["", "minio:9000", "http://", "http://[::1", "s3.example.org"])
def test_an_address_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv(variable, value)
    said = init(tmp_path / "new", monkeypatch, "s3://artifacts/team")
    assert said.startswith(f"error: {variable} must be the address of an S3 server")
    assert repr(value) in said


def test_a_store_that_is_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: HostileProxy) -> None:
    proxy.ill(GONE)
    said = init(tmp_path / "new", monkeypatch, "s3://artifacts/team")
    assert "artifact store s3://artifacts/team does not answer" in said


def test_a_bucket_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: HostileProxy
) -> None:
    said = init(tmp_path / "new", monkeypatch, "s3://artefacts/team")
    assert "artifact store s3://artefacts/team: this address has no such bucket" in said


def test_a_panic_of_the_store_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: HostileProxy) -> None:
    """What an address can be wrong in is not ours to list: obstore panics with a class that no module has."""

    class PanicException(BaseException): ...

    def panics(*_: object, **__: object) -> None:
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr("obstore.put", panics)
    assert "is not usable" in init(tmp_path / "new", monkeypatch, "s3://artifacts/team")


def test_a_server_asks_its_store_until_it_answers(
    proxy: HostileProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "posttrain.server")
    monkeypatch.setattr("posttrain.server.service._LOOK", 0.0)
    proxy.ill(GONE)
    blobs, over, tries = open_blobs("s3://artifacts/team"), threading.Event(), []

    def probe() -> None:
        tries.append(look.trouble())
        if len(tries) == 3:
            proxy.heal()
        blobs.probe()

    look = StoreLook(probe, over)
    look.keep_looking()
    assert look.trouble() == ""
    assert len(tries) == 3
    assert all(tries)
    told = [record.getMessage() for record in caplog.records if record.name == "posttrain.server"]
    assert len(told) == 2, told
    assert told[0].startswith("artifact store s3://artifacts/team does not answer")
    assert told[0].endswith("this server is not ready until the store answers")
    assert told[1] == "the artifact store answers"
