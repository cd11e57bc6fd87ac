"""Where a server sends on what its users ask: to no address of which it is not sure."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.control.owners import process_name
from posttrain.domain.errors import InputError
from posttrain.server.addresses import checked_advertised
from posttrain.server.forwarding import is_near, is_sure
from posttrain.server.serving import Bind
from posttrain.store.hosts import Host


def host(url: str, server: str = "elsewhere:1:1.00") -> Host:
    return Host("b" * 32, "b:/posttrain", url, server, "0.1.0", 1.0)


@pytest.mark.parametrize("url", ["", "http://b.example.org:8460", "https://user:word@b.example.org", "ftp://b"])
def test_an_address_that_anybody_could_have_is_none(url: str) -> None:
    assert not is_sure(host(url))
    assert not is_sure(host(url, process_name()))


def test_a_certificate_says_whose_it_is() -> None:
    assert is_sure(host("https://b.example.org:8460"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8460", "https://localhost:8460", "http://[::1]:8460"])
def test_loopback_is_anothers_unless_its_process_lives_here(url: str) -> None:
    assert is_sure(host(url, process_name()))
    here, _, started = process_name().rsplit(":", 2)
    for server in ("", "elsewhere:1:1.00", f"{here}:1:{started}", f"{here}:4194305:1.00"):
        assert not is_sure(host(url, server)), server


def test_a_process_of_another_network_is_not_near(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_near(process_name())
    spaces = iter(["net:[1]", "net:[2]"])
    monkeypatch.setattr("os.readlink", lambda path: next(spaces))
    assert not is_near(process_name())


@pytest.mark.parametrize(
    "url", ["http://b.example.org", "https://a:b@b.example.org", "https://", "x", "https://b:port"]
)
def test_what_others_could_listen_to_is_not_advertised(url: str) -> None:
    with pytest.raises(InputError, match="--advertise"):
        checked_advertised(url)
    with pytest.raises(InputError, match="--advertise"):
        Bind(advertise=url).checked()


def test_who_listens_behind_a_proxy_is_reached_where_it_says(tmp_path: Path) -> None:
    assert Bind("0.0.0.0", behind_proxy=True).advertised(8460) == ""
    assert (
        Bind("0.0.0.0", behind_proxy=True, advertise="https://a.example.org/").advertised(1) == "https://a.example.org"
    )
    assert Bind().advertised(8460) == "http://127.0.0.1:8460"
    sure = Bind("10.0.0.7", certificate=tmp_path / "c", key=tmp_path / "k")
    assert sure.advertised(8460) == "https://10.0.0.7:8460"
