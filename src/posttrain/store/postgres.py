"""A ledger in PostgreSQL: its address, the options of its connections, and the translation of the server's errors.

The driver is psycopg (the extra `posttrain[postgres]`), which SQLAlchemy imports when it creates an engine. Errors are
distinguished by SQLSTATE, or by libpq's message if a connection fails before there is a SQLSTATE.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import URL, Connection, exc, make_url, text

from posttrain.domain.errors import (
    ConflictError,
    DeadlineError,
    InputError,
    LedgerUnavailableError,
    PosttrainError,
    WorkspaceError,
)

SCHEME = "postgresql"
EXTRA = "pip install 'posttrain[postgres]'"
_DRIVER = "postgresql+psycopg"
_SPELLINGS = (SCHEME, "postgres", _DRIVER)
_SECRETS = ("password", "sslpassword")  # libpq accepts these as parameters of a URL
_CONNECT_SECONDS = 10
_NOTICED = {  # options with which a lost server is detected within a minute
    **{"keepalives_idle": 20, "keepalives_interval": 5, "keepalives_count": 4},  # seconds, seconds, times
    "tcp_user_timeout": 40_000,  # milliseconds
}
_WORDS = {
    "password authentication failed": "it refuses the password; set the right one in PGPASSWORD or ~/.pgpass",
    "no password supplied": "it requires a password; set it in PGPASSWORD or ~/.pgpass",
    "no pg_hba.conf entry": "it does not accept this user from this host; ask its administrator",
    "does not exist": "it has no such database or user; create them first (createuser, createdb)",
    "too many clients": "it has no free connection; close other connections or raise its max_connections",
    "starting up": "it is starting; run the command again",
    "shutting down": "it is shutting down; start it and run the command again",
}
_PASSING = frozenset(_WORDS[words] for words in ("too many clients", "starting up", "shutting down"))
_STATES: Mapping[str, str] = {
    "28P01": _WORDS["password authentication failed"],
    "28000": _WORDS["no pg_hba.conf entry"],
    "3D000": _WORDS["does not exist"],
    "3F000": "it has no schema for the tables; set the user's search_path",
    "42501": "this user lacks a permission; grant it, or use the owner",
    "53100": "its disk is full; free some space and run the command again",
    "53300": _WORDS["too many clients"],
    "25006": "it is read-only; name the server that accepts writes",
    "40001": "two transactions conflicted; run the command again",
    "40P01": "two transactions were deadlocked; run the command again",
}
_LATE = ("55P03", "57014")  # lock_timeout, statement_timeout
_RETRIED = ("40001", "40P01")
_LOST = ("08", "57P")  # SQLSTATE classes: connection exceptions, operator intervention


def is_address(address: str) -> bool:
    """Return whether this is the address of a PostgreSQL database."""
    return address.partition("://")[0] in _SPELLINGS


def checked_address(address: str) -> str:
    """Return the address in its normal form, as it is stored and compared.

    Raises:
        InputError: the address is not a PostgreSQL address, or contains a password.
    """
    try:
        url = make_url(address) if is_address(address) else None
    except (exc.ArgumentError, ValueError):  # such as a port that is not a number
        url = None
    if url is None or not url.database:
        masked = f"{address.partition('://')[0]}://…" if "://" in address else address
        raise InputError(f"ledger address must be {SCHEME}://user@host/database, got {masked!r}; correct it")
    refuse_secrets(url)
    return shown(url)


def with_driver(url: URL) -> URL:
    """Return the URL with the driver name by which SQLAlchemy loads psycopg."""
    return url.set(drivername=_DRIVER) if url.drivername in _SPELLINGS else url


def shown(url: URL) -> str:
    """Return the URL as people write it, without any secret."""
    bare = URL.create(SCHEME, url.username, None, url.host, url.port, url.database, url.query)
    return bare.difference_update_query(_SECRETS).render_as_string().replace("%2F", "/")  # slashes of a socket's folder


def refuse_secrets(url: URL) -> None:
    """Reject an address with a password, because addresses are stored and shown.

    Raises:
        InputError: the URL contains a password.
    """
    if url.password is not None or any(name in url.query for name in _SECRETS):
        raise InputError(f"ledger address {shown(url)} must not contain a password; set it in PGPASSWORD or ~/.pgpass")


def engine_options(url: URL, busy_seconds: float) -> dict[str, Any]:
    """Return the connection options of an engine.

    A process that waits for a lock gives up after `busy_seconds`, as on SQLite. If the process that holds the lock is
    idle for half as long (stopped, swapped out or disconnected), the server ends that process's session, before the
    waiting processes give up.
    """
    waits = {
        "lock_timeout": busy_seconds,
        "idle_in_transaction_session_timeout": busy_seconds / 2,
    }
    given = url.query.get("options", "")
    ours = [f"-c {name}={max(1, int(seconds * 1000))}" for name, seconds in waits.items()]
    options = " ".join([*ours, *([given] if isinstance(given, str) else given)]).strip()
    arguments: dict[str, Any] = {"options": options, "application_name": "posttrain", **_NOTICED}
    if "connect_timeout" not in url.query:
        arguments["connect_timeout"] = _CONNECT_SECONDS
    arguments = {name: value for name, value in arguments.items() if name == "options" or name not in url.query}
    return {"connect_args": arguments, "pool_pre_ping": True, "isolation_level": "READ COMMITTED"}


def may_write(connection: Connection, table: str) -> bool:
    """Return whether this user may insert rows, on a server that accepts writes."""
    asked = "SELECT has_table_privilege(:name, 'INSERT') AND NOT pg_is_in_recovery()"
    return bool(connection.execute(text(asked), {"name": table}).scalar_one())


def product(connection: Connection) -> tuple[str, str]:
    """Return the server's name and version, and the settings that allow a power cut to lose commits ("": none)."""
    wanted = "SELECT name, setting FROM pg_settings WHERE name IN ('server_version', 'fsync', 'synchronous_commit')"
    rows = {str(row[0]): str(row[1]) for row in connection.execute(text(wanted))}
    unsafe = [name for name in ("fsync", "synchronous_commit") if rows[name] == "off"]
    return f"PostgreSQL {rows['server_version'].split()[0]}", " and ".join(unsafe)


def translate(error: BaseException | None, place: str, busy_seconds: float) -> PosttrainError:
    """Translate an error of the driver into an error with a one-line message."""
    said, state = " ".join(str(error).split()), getattr(error, "sqlstate", None) or ""
    if state in _LATE:
        return DeadlineError(
            f"ledger {place} was locked by another process for more than {busy_seconds:g} s; run the command again"
        )
    reason = _STATES.get(state)
    if state in _RETRIED:
        return ConflictError(f"ledger {place}: {reason}")
    if reason is None and not state:
        reason = next((reason for words, reason in _WORDS.items() if words in said), None)
    if reason is None and (not state or state.startswith(_LOST)):
        reason = f"it cannot be reached, or ended the connection ({said}); check it and run the command again"
        return LedgerUnavailableError(f"cannot use the ledger {place}: {reason}")
    if reason in _PASSING:
        return LedgerUnavailableError(f"cannot use the ledger {place}: {reason}")
    return WorkspaceError(f"cannot use the ledger {place}: {reason or f'{said}; check its address and its schema'}")
