"""A PostgreSQL server of our own: made in a temporary folder, started, stopped with whoever started it.

Its programs refuse to run as root, so root starts them as a user of the system. It listens on a socket in its folder,
where everybody is let in, and on loopback, where a password is asked for.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

USER = "posttrain"
PASSWORD = "not a secret"
_USERS = ("postgres", "nobody")
_PLACES = Path("/usr/lib/postgresql")  # Debian's: one folder each version
_PATIENCE = 120.0  # seconds: a start or a stop takes less than one


class MissingError(Exception):
    """PostgreSQL is not installed."""


def programs() -> Path:
    """The folder of initdb and postgres: $POSTGRES_BIN, that of the PATH, else Debian's newest.

    Raises:
        MissingError: there is none.
    """
    named, found = os.environ.get("POSTGRES_BIN"), shutil.which("initdb")
    newest = sorted(_PLACES.glob("*/bin"), key=lambda place: float(place.parent.name), reverse=True)
    places = [Path(named)] if named else [*([Path(found).resolve().parent] if found else []), *newest]
    for place in places:
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    raise MissingError(
        "make postgres needs PostgreSQL: apt-get install -y postgresql (or set POSTGRES_BIN to the folder of initdb)"
    )


class Server:
    """One server.

    Args:
        durable: it waits for the disk at each commit, as a real one; otherwise it is faster.
    """

    def __init__(self, *, durable: bool = False) -> None:
        self._bin = programs()
        self._account = _account()
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None
        self._made = 0
        self.folder = Path(tempfile.mkdtemp(prefix="posttrain-pg-", dir="/tmp"))  # a socket's path may have 107 bytes
        try:
            self._own(self.folder)
            self._initialise()
            self.port = _free_port()
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it and wait until it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            "fsync": "on" if self._durable else "off",
            "max_connections": 60,
            "shared_buffers": "32MB",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._as_account([str(self._bin / "postgres"), "-D", str(self.folder / "data"), *words]),
                stdout=log, stderr=log, cwd="/", env=_plain_environment(),
            )  # fmt: skip
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"PostgreSQL did not start: {self.log()[-2000:]}")
            if self._run("pg_isready", "-q", "-h", str(self.folder), "-p", str(self.port)).returncode == 0:
                return

    def stop(self, how: int = signal.SIGINT) -> None:
        """End it. SIGINT ends every connection first; SIGQUIT ends it as a power cut would."""
        if self._process is None:
            return
        for number in (how, signal.SIGQUIT, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
            try:
                self._process.wait(_PATIENCE)
                break
            except subprocess.TimeoutExpired:
                continue
        self._process = None

    def close(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def create(self, like: str | None = None) -> str:
        """The address of a new database: with nothing in it, or with what another has, to which nobody is connected."""
        self._made += 1
        name = f"ledger_{os.getpid()}_{self._made}"
        self.sql(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{_name(like)}"' if like else ""))
        return self.address(name)

    def drop(self, address: str) -> None:
        """Remove a database, ending whoever is connected to it."""
        self.sql(f'DROP DATABASE IF EXISTS "{_name(address)}" WITH (FORCE)')

    def address(self, name: str) -> str:
        """The address of a database by the socket."""
        return f"postgresql://{USER}@/{name}?host={self.folder}&port={self.port}"

    def over_tcp(self, address: str) -> str:
        """The same database where a password is asked for."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{_name(address)}"

    def sql(self, statement: str, address: str | None = None) -> list[Any]:
        """What one statement answers, outside any transaction."""
        import psycopg

        with psycopg.connect(address or self.address("postgres"), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def log(self) -> str:
        """What the server said."""
        return (self.folder / "log").read_text(errors="replace")

    def _initialise(self) -> None:
        password = self.folder / "password"
        password.write_text(PASSWORD + "\n")
        self._own(password)
        words = ["--pgdata", str(self.folder / "data"), "--username", USER, "--encoding", "UTF8", "--no-locale"]
        access = ["--auth-local", "trust", "--auth-host", "scram-sha-256", "--pwfile", str(password), "--no-sync"]
        made = self._run("initdb", *words, *access)
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stdout}")

    def _run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = self._as_account([str(self._bin / program), *words])
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd="/",
            env=_plain_environment(),
        )  # fmt: skip

    def _as_account(self, command: list[str]) -> list[str]:
        """The command as the unprivileged user, ended with whoever started it (a fast shutdown)."""
        words = ["setpriv", "--pdeathsig", "INT"]
        if self._account:
            words += ["--reuid", str(self._account.pw_uid), "--regid", str(self._account.pw_gid), "--clear-groups"]
        return [*words, *command]

    def _own(self, path: Path) -> None:
        if self._account:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)
        path.chmod(0o711 if path.is_dir() else 0o600)


def _account() -> pwd.struct_passwd | None:
    """Whom root starts it as; None for anybody else."""
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise MissingError(f"make postgres needs one of the users {', '.join(_USERS)}: initdb refuses root")


def _plain_environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _name(address: str) -> str:
    return address.partition("?")[0].rpartition("/")[2]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    try:
        programs()
        _account()
    except MissingError as error:
        sys.exit(str(error))
