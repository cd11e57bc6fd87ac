"""What every sink must honour: whole, in order, or an error in one line; and what each does beyond that."""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.domain.errors import InputError, SinkError
from posttrain.domain.sinks import Notice
from posttrain.events.ports import Sink
from posttrain.events.sinks.email import EmailSink
from posttrain.events.sinks.fake import FakeSink
from posttrain.events.sinks.jsonl import JsonLinesSink
from posttrain.events.sinks.webhook import WebhookSink
from sink_servers import PASSWORD, SECRET, Mailbox, Receiver, certificate, mailbox, receiver

NOW = 1_700_000_000.7


def notice(number: int, **changes: Any) -> Notice:
    made = Notice(
        f"evt_{number}_00ff", number, 1.7e9 + number, f"run sort-{number} failed",
        ("It failed.", "Reason: GateFailed.", "Next: posttrain why sort-1"), {},
    )  # fmt: skip
    return replace(made, body={"id": made.id, "sequence": number, "type": "run.failed"}, **changes)


@dataclass
class Bench:
    """A sink, what arrived there (id, sequence), and how it gets into trouble and out of it."""

    sink: Sink
    arrived: Callable[[], list[tuple[str, int]]]
    spoil: Callable[[], None]
    mend: Callable[[], None]


def of_webhook(known: Receiver, path: str = "", **settings: Any) -> WebhookSink:
    return WebhookSink({"url": known.url + path, "secret_env": "POSTTRAIN_SINK_HOOK_SECRET", **settings}, lambda: NOW)


def of_email(known: Mailbox, **settings: Any) -> EmailSink:
    said = {"to": "ann@example.org", "from": "posttrain@example.org", "host": "127.0.0.1", "port": known.port}
    return EmailSink({**said, "security": "none", **settings})


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK_SECRET", SECRET)
    with receiver() as known:
        yield known


@pytest.fixture
def smtp() -> Iterator[Mailbox]:
    with mailbox() as known:
        yield known


@pytest.fixture(params=["webhook", "jsonl", "email", "fake"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    if request.param == "webhook":
        http: Receiver = request.getfixturevalue("http")
        seen = lambda: [(p.headers["webhook-id"], json.loads(p.body)["sequence"]) for p in http.posts]  # noqa: E731
        refused: list[int] = []

        def spoil() -> None:
            http.always = 503
            refused.append(len(http.posts))

        def mend() -> None:
            http.always = 200
            del http.posts[refused[-1] :]

        return Bench(of_webhook(http, "?token=hidden"), seen, spoil, mend)
    if request.param == "email":
        smtp: Mailbox = request.getfixturevalue("smtp")

        def mails() -> list[tuple[str, int]]:
            return [(str(m["X-Posttrain-Event"]), int(m["X-Posttrain-Sequence"])) for m in smtp.mails]

        return Bench(of_email(smtp), mails, lambda: smtp.answers.extend([452] * 9), smtp.answers.clear)
    if request.param == "jsonl":
        path = tmp_path / "events.jsonl"

        def lines() -> list[tuple[str, int]]:
            said = path.read_text().splitlines() if path.exists() else []
            return [(one["id"], one["sequence"]) for one in map(json.loads, said)]

        def away() -> None:
            path.rename(tmp_path / "kept") if path.exists() else None
            path.mkdir()

        def back() -> None:
            path.rmdir()
            (tmp_path / "kept").rename(path) if (tmp_path / "kept").exists() else None

        return Bench(JsonLinesSink({"path": str(path)}), lines, away, back)
    found: list[Notice] = []
    broken: list[bool] = []

    def trouble() -> None:
        if broken:
            raise SinkError("memory: is full")

    return Bench(
        FakeSink(found, trouble), lambda: [(n.id, n.sequence) for n in found], lambda: broken.append(True), broken.clear
    )


def sent(*numbers: int) -> list[tuple[str, int]]:
    return [(f"evt_{number}_00ff", number) for number in numbers]


def test_everything_arrives_in_its_order(bench: Bench) -> None:
    for first in (1, 1 + bench.sink.most):
        bench.sink.send([notice(number) for number in range(first, first + bench.sink.most)])
    assert bench.arrived() == sent(*range(1, 1 + 2 * bench.sink.most))


def test_what_comes_again_has_the_same_id(bench: Bench) -> None:
    for _ in range(2):
        bench.sink.send([notice(7)])
    assert bench.arrived() == sent(7, 7)


def test_trouble_is_an_error_in_one_line_and_over_when_it_is(bench: Bench) -> None:
    bench.sink.send([notice(1)])
    bench.spoil()
    for _ in range(2):
        with pytest.raises(SinkError) as caught:
            bench.sink.send([notice(2)])
        said = str(caught.value)
        assert "\n" not in said
        assert said.startswith(bench.sink.where)
        assert all(hidden not in said for hidden in (SECRET, PASSWORD, "hidden", "token"))
    bench.mend()
    bench.sink.send([notice(2)])
    assert bench.arrived() == sent(1, 2)


def test_words_of_others_stay_inside_their_message(bench: Bench) -> None:
    bad = "done\r\nBcc: all@example.org\r\n\r\n.\r\nMAIL FROM:<x>\n\u2028\ud800\x00"
    bench.sink.send([notice(3, subject=bad, lines=(bad, bad, bad))])
    bench.sink.send([notice(4)])
    assert bench.arrived() == sent(3, 4)


# --- webhook ----------------------------------------------------------------------------------------------------------


def test_a_webhook_is_signed_over_id_time_and_body(http: Receiver) -> None:
    of_webhook(http).send([notice(1)])
    (post,) = http.posts
    assert post.signed_by(SECRET)
    assert post.headers["webhook-timestamp"] == "1700000000"
    assert post.headers["content-type"] == "application/json"
    assert json.loads(post.body) == notice(1).body
    assert not post.signed_by("another secret of sixteen")
    for name, value in (("webhook-id", "evt_2_00ff"), ("webhook-timestamp", "1700000001")):
        assert not replace(post, headers={**post.headers, name: value}).signed_by(SECRET)
    assert not replace(post, body=post.body.replace(b"failed", b"passed")).signed_by(SECRET)


def test_the_example_of_the_specification_is_signed_as_it_is_there() -> None:
    from posttrain.events.sinks.webhook import signature

    body = b'{"test": 2432232314}'
    found = signature("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_while_a_secret_is_rotated_either_one_verifies(http: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK_SECRET", f"{'n' * 24} {'o' * 24}")
    of_webhook(http).send([notice(1)])
    assert http.posts[0].signed_by("n" * 24)
    assert http.posts[0].signed_by("o" * 24)


def test_a_secret_may_lie_in_a_file(http: Receiver, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{'f' * 24}\n")
    of_webhook(http, secret_env=None, secret_file=str(tmp_path / "secret")).send([notice(1)])
    assert http.posts[0].signed_by("f" * 24)


@pytest.mark.parametrize("value", ["", "  ", "short", "whsec_no base64", "whsec_c2hvcnQ="])
def test_without_a_good_secret_nothing_is_sent(http: Receiver, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK_SECRET", value)
    with pytest.raises(SinkError) as caught:
        of_webhook(http).send([notice(1)])
    assert not http.posts
    assert not value.strip() or value not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (500, "answers 500"),
        (404, "answers 404"),
        (302, "redirects are not followed"),
        ("drop", "no proper answer"),
        ("noise", "no proper answer"),
        ("drip", "no answer within"),
        ("hang", "no answer within"),
    ],
)
def test_what_is_no_success_is_a_failure(http: Receiver, answer: int | str, words: str) -> None:
    http.answers = [answer]
    sink = WebhookSink({"url": http.url, "secret_env": "POSTTRAIN_SINK_HOOK_SECRET"}, lambda: NOW, patience=1.0)
    with pytest.raises(SinkError, match=words):
        sink.send([notice(1)])
    assert len(http.posts) == 1, "a redirect was followed"
    sink.send([notice(1)])
    assert len(http.posts) == 2


def test_a_long_answer_is_not_read(http: Receiver) -> None:
    http.answers = ["large"]
    of_webhook(http).send([notice(1)])


def test_nobody_there_is_said(http: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    for host, words in ((f"127.0.0.1:{port}", "connection refused"), ("no.such.host.invalid", "cannot be found")):
        sink = WebhookSink(
            {"url": f"http://{host}/x?key=hidden", "secret_env": "POSTTRAIN_SINK_HOOK_SECRET"}, lambda: NOW
        )
        with pytest.raises(SinkError, match=words) as caught:
            sink.send([notice(1)])
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["", "ftp://x/y", "http:///x", "file:///etc/passwd", "http://u:p4ss@host/", "http://u@host/", "http://h:0/",
     "http://h:99999/", "http://h/ x", "http://h/\r\nX: y", "http://[::1/", "http://hé/", "/x"],
)  # fmt: skip
def test_a_url_that_cannot_be_posted_to_is_refused(url: str) -> None:
    with pytest.raises(InputError) as caught:
        WebhookSink({"url": url, "secret_env": "POSTTRAIN_SINK_X"}, lambda: NOW)
    assert "p4ss" not in str(caught.value)


def test_a_url_may_be_named_by_a_variable(http: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK_SECRET", SECRET)
    sink = WebhookSink({"url_env": "POSTTRAIN_SINK_HOOK_URL", "secret_env": "POSTTRAIN_SINK_HOOK_SECRET"}, lambda: NOW)
    with pytest.raises(SinkError, match="POSTTRAIN_SINK_HOOK_URL is not set"):
        sink.send([notice(1)])
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK_URL", http.url)
    sink.send([notice(1)])
    assert sink.where == "the URL in POSTTRAIN_SINK_HOOK_URL"
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK_URL", "http://u:p4ss@h/")
    with pytest.raises(SinkError) as caught:
        sink.send([notice(1)])
    assert "p4ss" not in str(caught.value)


def test_a_server_may_refuse_addresses_by_what_they_are(http: Receiver) -> None:
    asked: list[str] = []

    def admit(address: str) -> str:
        asked.append(address)
        return "it is of this machine"

    sink = WebhookSink({"url": http.url, "secret_env": "POSTTRAIN_SINK_HOOK_SECRET"}, lambda: NOW, admit)
    with pytest.raises(SinkError, match="delivery to this address is not allowed: it is of this machine"):
        sink.send([notice(1)])
    assert (asked, http.posts) == (["127.0.0.1"], [])


def test_a_certificate_must_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_SINK_HOOK_SECRET", SECRET)
    made = certificate(tmp_path)
    with receiver(made) as https:
        with pytest.raises(SinkError, match="certificate cannot be trusted"):
            of_webhook(https).send([notice(1)])
        assert not https.posts
        monkeypatch.setenv("SSL_CERT_FILE", str(made[0]))
        of_webhook(https).send([notice(1)])
        assert https.posts[0].signed_by(SECRET)


# --- JSON lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 5, 20, -1])
def test_half_a_line_is_taken_away_before_the_next(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLinesSink({"path": str(path)})
    sink.send([notice(1), notice(2)])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[:first] + whole[first : len(whole) - 1][:keep])  # killed inside the second line
    sink.send([notice(2), notice(3)])
    found = [json.loads(line)["sequence"] for line in path.read_text().splitlines()]
    assert found == [1, 2, 3]


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLinesSink({"path": str(path)})
    sink.send([notice(1)])
    path.write_bytes(path.read_bytes()[:-1])
    sink.send([notice(1)])  # whoever was killed before the cursor moved sends it again
    assert [json.loads(line)["sequence"] for line in path.read_text().splitlines()] == [1, 1]


def test_what_somebody_else_wrote_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("my notes, without an end")
    with pytest.raises(SinkError, match="got other content; name another"):
        JsonLinesSink({"path": str(path)}).send([notice(1)])
    assert path.read_text() == "my notes, without an end"


def test_only_what_holds_events_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    path.write_text("export X=1\n")
    with pytest.raises(SinkError, match="must be empty or contain events"):
        JsonLinesSink({"path": str(path)}).send([notice(1)])
    assert path.read_text() == "export X=1\n"
    for name in (".bashrc", "events", "events.json", "x.jsonl.sh"):
        with pytest.raises(InputError, match=r"must end with \.jsonl"):
            JsonLinesSink({"path": str(tmp_path / name)})


def test_a_sink_names_no_variable_that_was_not_made_for_sinks(smtp: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "hidden-password")
    web = {"url": "http://127.0.0.1/"}
    for settings in ({**web, "secret_env": "PGPASSWORD"}, {"url_env": "PGPASSWORD", "secret_env": "POSTTRAIN_SINK_X"}):
        with pytest.raises(InputError, match="must begin with POSTTRAIN_SINK_"):
            WebhookSink(settings, lambda: NOW)
    for field in ("user_env", "password_env"):
        named = {"user_env": "POSTTRAIN_SINK_A", "password_env": "POSTTRAIN_SINK_B", field: "PGPASSWORD"}
        with pytest.raises(InputError, match="must begin with POSTTRAIN_SINK_"):
            of_email(smtp, security="starttls", **named)


def test_a_variable_that_holds_no_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_SINK_URL", "hidden-words")
    sink = WebhookSink({"url_env": "POSTTRAIN_SINK_URL", "secret_env": "POSTTRAIN_SINK_X"}, lambda: NOW)
    monkeypatch.setenv("POSTTRAIN_SINK_X", SECRET)
    with pytest.raises(SinkError, match="POSTTRAIN_SINK_URL must contain http") as caught:
        sink.send([notice(1)])
    assert "hidden-words" not in str(caught.value)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLinesSink({"path": str(path)})
    sink.send([notice(1)])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(SinkError, match="cannot be written"):
            sink.send([notice(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_only_a_file_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(SinkError):  # and it does not wait for a reader
        JsonLinesSink({"path": str(tmp_path / "pipe.jsonl")}).send([notice(1)])
    for path in ("events.jsonl", "~/events.jsonl", ""):
        with pytest.raises(InputError, match="absolute"):
            JsonLinesSink({"path": path})


def test_a_file_that_is_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLinesSink({"path": str(path)})
    sink.send([notice(1)])
    path.rename(tmp_path / "events.1")
    sink.send([notice(2)])
    assert json.loads(path.read_text())["sequence"] == 2


# --- e-mail -----------------------------------------------------------------------------------------------------------


def test_a_mail_says_what_happened_and_which_event_it_is(smtp: Mailbox) -> None:
    of_email(smtp).send([notice(1)])
    (mail,) = smtp.mails
    assert (mail["Subject"], mail["To"], mail["Message-ID"]) == (
        "run sort-1 failed", "ann@example.org", "<evt_1_00ff@posttrain>",
    )  # fmt: skip
    body = str(mail.get_payload()).splitlines()
    assert body[:3] == list(notice(1).lines)


@pytest.mark.parametrize(
    ("answer", "words"), [(550, "answers 550"), ("drop", "the server failed"), ("hang", "no answer within")]
)
def test_a_mail_that_was_not_taken_is_a_failure(smtp: Mailbox, answer: int | str, words: str) -> None:
    smtp.answers = [answer]
    said = {"to": "a@b.org", "from": "p@b.org", "host": "127.0.0.1", "port": smtp.port, "security": "none"}
    with pytest.raises(SinkError, match=words) as caught:
        EmailSink(said, patience=1.0).send([notice(1)])
    assert SECRET not in str(caught.value)
    assert not smtp.mails


def test_user_and_password_go_over_tls_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = certificate(tmp_path)
    named = {"user_env": "POSTTRAIN_SINK_MAIL_USER", "password_env": "POSTTRAIN_SINK_MAIL_PASSWORD"}
    monkeypatch.setenv("POSTTRAIN_SINK_MAIL_USER", "ann")
    monkeypatch.setenv("POSTTRAIN_SINK_MAIL_PASSWORD", PASSWORD)
    with mailbox(made) as box, mailbox() as plain:
        with pytest.raises(InputError, match="a password needs"):
            of_email(box, **named)
        secured = of_email(box, security="starttls", **named)
        with pytest.raises(SinkError, match="certificate cannot be trusted"):
            secured.send([notice(1)])
        monkeypatch.setenv("SSL_CERT_FILE", str(made[0]))
        secured.send([notice(1)])
        assert (box.logins, len(box.mails)) == (["ann"], 1)
        with pytest.raises(SinkError, match="does not support the requested method"):
            of_email(plain, security="starttls", **named).send([notice(1)])
        monkeypatch.setenv("POSTTRAIN_SINK_MAIL_PASSWORD", "wrong horse")
        with pytest.raises(SinkError, match="rejects the user name and password") as caught:
            secured.send([notice(1)])
        assert "wrong horse" not in str(caught.value)
        assert not plain.logins


@pytest.mark.parametrize(
    ("field", "value"),
    [("to", "ann"), ("to", "a@b.org, c@d.org"), ("to", "a@b.org\nBcc: x@y"), ("from", ""), ("port", 0), ("port", "25"),
     ("host", "h h"), ("host", ""), ("security", "ssl"), ("user_env", "POSTTRAIN_SINK_X"), ("what", "x")],
)  # fmt: skip
def test_settings_of_a_mail_that_are_none_are_refused(smtp: Mailbox, field: str, value: Any) -> None:
    with pytest.raises(InputError):
        of_email(smtp, **{field: value})
