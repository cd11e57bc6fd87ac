"""Receivers of events for tests: an HTTP and an SMTP server of this process, which may also behave badly."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import ipaddress
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECRET = "a-secret-of-more-than-sixteen-bytes"
PASSWORD = "correct horse"


@dataclass
class Post:
    """One request that arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    def signed_by(self, secret: str) -> bool:
        """As a receiver checks it, written from the specification."""
        said = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode() + self.body
        wanted = base64.b64encode(hmac.new(secret.encode(), said, hashlib.sha256).digest()).decode()
        return f"v1,{wanted}" in self.headers["webhook-signature"].split(" ")


@dataclass
class Receiver:
    """An HTTP server; `answers` are what it does with the next requests, 200 when there is none."""

    url: str = ""
    answers: list[int | str] = field(default_factory=list)
    always: int | str = 200
    posts: list[Post] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    came: threading.Condition = field(default_factory=threading.Condition)

    def until(self, enough: Callable[[list[Post]], bool]) -> list[Post]:
        """What arrived, once it is enough."""
        with self.came:
            self.came.wait_for(lambda: enough(self.posts))
            return list(self.posts)

    def next(self) -> int | str:
        return self.answers.pop(0) if self.answers else self.always


@contextmanager
def receiver(certificate: tuple[Path, Path] | None = None) -> Iterator[Receiver]:
    """An HTTP server on loopback; with a certificate and its key, one of HTTPS."""
    known = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = known.next()
            with known.came:
                known.posts.append(Post(self.path, headers, body))
                known.came.notify_all()
            if answer == "drop":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if answer == "hang":
                known.over.wait()
                return
            if answer == "drip":
                with suppress(OSError):
                    while not known.over.wait(0.05):
                        self.connection.sendall(b"H")
                return
            if answer == "noise":
                self.wfile.write(b"220 not the server you want\r\n")
                return
            self.send_response(int(answer) if answer != "large" else 200)
            if answer == 302:
                self.send_header("location", known.url)
            self.end_headers()
            if answer == "large":
                with suppress(OSError):
                    for _ in range(10_000):
                        self.wfile.write(b"x" * 65536)
            else:
                self.wfile.write(SECRET.encode())

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    known.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield known
    finally:
        known.over.set()
        server.shutdown()
        server.server_close()


@dataclass
class Mailbox:
    """An SMTP server and what it took; `answers` are what it says to the next messages, 250 when there is none."""

    port: int = 0
    answers: list[int | str] = field(default_factory=list)
    mails: list[Message] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


class _Smtp(socketserver.StreamRequestHandler):
    known: Mailbox
    certificate: tuple[Path, Path] | None

    def say(self, *lines: str) -> None:
        self.wfile.write("".join(f"{line}\r\n" for line in lines).encode())
        self.wfile.flush()

    def handle(self) -> None:
        with suppress(OSError, ValueError):
            self.say("220 test ready")
            while line := self.rfile.readline():
                if not self.command(line.decode().strip()):
                    return

    def command(self, line: str) -> bool:
        verb = line[:4].upper()
        if verb == "EHLO":
            can = ["250-test"] + (["250-STARTTLS"] if self.certificate else []) + ["250 AUTH PLAIN"]
            self.say(*can)
        elif verb == "STAR":
            self.say("220 go on")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            assert self.certificate
            context.load_cert_chain(*self.certificate)
            self.connection = context.wrap_socket(self.connection, server_side=True)
            self.setup_streams()
        elif verb == "AUTH":
            user, password = base64.b64decode(line.split()[2]).decode().split("\0")[1:]
            self.known.logins.append(user)
            self.say("235 welcome" if password == PASSWORD else f"535 {password} is wrong")
        elif verb == "DATA":
            return self.data()
        elif verb == "QUIT":
            self.say("221 bye")
            return False
        else:  # MAIL, RCPT, RSET
            self.say("250 ok")
        return True

    def setup_streams(self) -> None:
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb")

    def data(self) -> bool:
        self.say("354 go on")
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line)
        answer = self.known.answers.pop(0) if self.known.answers else 250
        if answer == "drop":
            return False
        if answer == "hang":
            self.known.over.wait()
            return False
        if answer == 250:
            self.known.mails.append(message_from_bytes(b"".join(lines)))
        self.say(f"{answer} {SECRET}")
        return True


@contextmanager
def mailbox(certificate: tuple[Path, Path] | None = None) -> Iterator[Mailbox]:
    """An SMTP server on loopback; with a certificate and its key it takes STARTTLS."""
    known = Mailbox()
    handler = type("Handler", (_Smtp,), {"known": known, "certificate": certificate})

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), handler)
    known.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield known
    finally:
        known.over.set()
        server.shutdown()
        server.server_close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return paths
