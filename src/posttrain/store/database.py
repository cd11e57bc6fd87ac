"""The ledger's database, its file and its clock.

This module opens or creates the database, and translates its errors. SQLite runs with a write-ahead log and
`synchronous=FULL` (a committed transaction survives a power cut), and every write transaction begins IMMEDIATE: it
waits for other writers at the start, where nothing is lost, instead of failing in the middle. On PostgreSQL
(`store.postgres`) a read transaction is REPEATABLE READ, and a write transaction is READ COMMITTED with
compare-and-sets; the first process that opens a ledger without tables creates them under an advisory lock.

The length of a ledger file and the write access to it are checked, and its permissions are restricted to its owner.

`SystemClock` is the real clock behind the `Clock` port. On PostgreSQL, the times in a ledger's rows are those of the
database server, because the clocks of the hosts need not agree.
"""

import copy
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Float,
    cast,
    create_engine,
    event,
    exc,
    func,
    insert,
    inspect,
    literal,
    make_url,
    select,
)

from posttrain.domain.errors import (
    ConflictError,
    DeadlineError,
    LedgerUnavailableError,
    PosttrainError,
    WorkspaceError,
    unwritable,
)
from posttrain.domain.ports import Clock
from posttrain.domain.records import DEFAULT_PROJECT
from posttrain.store import postgres
from posttrain.store.journal import TABLES, TRIGGER, tell_rows
from posttrain.store.schema import (
    SCHEMA_VERSION,
    USABLE_SINCE,
    events,
    metadata,
    payloads,
    projects,
    schema_versions,
    tree_head,
    work,
)
from posttrain.store.scope import ACROSS, OF, guard
from posttrain.store.trees import EMPTY

SERVER_TIME: ColumnElement[float] = cast(func.extract("epoch", func.clock_timestamp()), Float(53))
_MAGIC, _HEADER = b"SQLite format 3\0", 100  # bytes
_WRITE = "posttrain_write"
_MAKING = 0x706F7374  # key of PostgreSQL's advisory lock for creating a ledger
_FULL_BYTES = 2**20  # free bytes below which a failing disk counts as full
_KEPT, _MOST = 16, 64  # connections to a file: number kept open, maximum; opening a connection costs more than a query
_COMPLAINTS = 5  # lines of an integrity check that are shown


class SystemClock:
    """The wall clock of this machine."""

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Sleep for this number of seconds."""
        time.sleep(seconds)


def moment(connection: Connection, clock: Clock) -> dict[str, float]:
    """Return the time parameter of a prepared statement; empty: the statement uses the server's clock."""
    server = connection.dialect.name == "postgresql" and isinstance(clock, SystemClock)
    return {} if server else {"moment": clock.now()}


def now_in(connection: Connection, clock: Clock) -> ColumnElement[float]:
    """Return an SQL expression for the seconds since the epoch."""
    found = moment(connection, clock)
    return literal(found["moment"]) if found else SERVER_TIME


def refuse_cut_short(file: Path, create: bool) -> None:
    """Reject a truncated file: SQLite opens an empty file as a new database, and may detect missing pages late.

    Raises:
        WorkspaceError: there is no ledger, or the file is shorter than its header states.
    """
    try:
        size = file.stat().st_size
    except FileNotFoundError as error:
        if create:
            with suppress(OSError):  # opening the database reports the error
                # SQLite gives its log files the database's permissions
                os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            return
        raise WorkspaceError(f"there is no ledger at {file}; run `posttrain init` first") from error
    except OSError as error:
        raise unwritable(file, error) from error
    if not size and create:
        return  # just created by another process, or by one that died
    log = file.with_name(file.name + "-wal")
    if log.exists() and log.stat().st_size:
        return  # the log may contain the missing pages, which SQLite recovers
    with file.open("rb") as opened:
        header = opened.read(_HEADER)
    if size >= _HEADER and not header.startswith(_MAGIC):
        return  # not a database, which SQLite reports
    page = int.from_bytes(header[16:18]) or 0
    counted = header[24:28] == header[92:96]  # otherwise an older version of SQLite wrote the count
    wanted = max(_HEADER, (65536 if page == 1 else page) * int.from_bytes(header[28:32]) if counted else 0)
    if size < wanted:
        raise WorkspaceError(f"ledger {file} is truncated ({size} of {wanted} bytes); restore it from a copy")


def writable(file: Path) -> bool:
    """Return whether this process may write to a ledger file."""
    places = (file, file.absolute().parent)  # SQLite creates two files next to it
    return all(os.access(place, os.W_OK, effective_ids=True) for place in places)


class LostAnswerError(PosttrainError):
    """A commit whose outcome is unknown; the writer must read back what it wrote."""


class Database:
    """A ledger database of this schema.

    Args:
        location: path of a SQLite file, or a URL (`sqlite:///…`, `postgresql://user@host/database`).
        busy_seconds: maximum time that a transaction waits for another writer.
        create: whether to create a missing SQLite file, and the tables of a database without tables.

    Raises:
        WorkspaceError: the file is missing, truncated or not a database; the disk is full; the server is
            unreachable; the schema is older, or newer and not usable by this version of Posttrain. A read-only
            database can be read.
        InputError: the URL contains a password.
        DeadlineError: another process holds the database for longer than `busy_seconds`.
    """

    def __init__(self, location: str | Path, *, busy_seconds: float = 30.0, create: bool = True) -> None:
        self._busy, self._project = busy_seconds, ""
        self.clock: Clock = SystemClock()
        url = _url(location)
        self._sqlite = url.get_backend_name() == "sqlite"
        self.place = str(url.database) if self._sqlite else postgres.shown(url)
        if self._sqlite and (url.database or ":memory:") == ":memory:":
            raise WorkspaceError("the ledger needs a file, got an in-memory database; name a path")
        self._create = create
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self.read_only = False
        if self._sqlite:
            file = Path(str(url.database))
            refuse_cut_short(file, create)
            self.read_only = file.exists() and not writable(file)
        try:
            options: dict[str, Any] = {"creator": self._reader(file)} if self.read_only else {}
            options |= {"pool_size": _KEPT, "max_overflow": _MOST - _KEPT}
            self._engine = create_engine(url, **(options if self._sqlite else postgres.engine_options(url, self._busy)))
        except ModuleNotFoundError as error:
            raise WorkspaceError(
                f"cannot use the ledger {self.place}: its driver is not installed; {postgres.EXTRA}"
            ) from error
        guard(self._engine)
        if self._sqlite:
            event.listen(self._engine, "connect", self._on_connect)
            event.listen(self._engine, "begin", self._on_begin)
        try:
            with self._translated():
                self._prepare()
        except BaseException:
            self.close()
            raise

    def of(self, project: str) -> Self:
        """Return the same database for rows of one project: statements that name a different project are rejected."""
        mine = copy.copy(self)
        mine._project = project
        return mine

    @contextmanager
    def read(self, *, across: str = "") -> Iterator[Connection]:
        """Open a connection in a read transaction: all its reads are of one snapshot.

        Args:
            across: why the statements may read rows of every project; empty: each statement must name its project.
        """
        with self._translated(), self._engine.connect() as connection:
            connection.execution_options(**self._reach(across))
            if not self._sqlite:  # PostgreSQL's default gives each statement its own snapshot
                connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            with connection.begin():
                yield connection

    @contextmanager
    def write(self, *, across: str = "") -> Iterator[Connection]:
        """Open a connection in a write transaction, committed at the end, rolled back if the block raises.

        Args:
            across: see `read`.

        Raises:
            WorkspaceError: the ledger is read-only.
            LostAnswerError: the connection was lost during the commit, which may have succeeded.
        """
        if self.read_only:
            remedy = "make it and its folder writable" if self._sqlite else "use a user and a server that may write"
            raise WorkspaceError(f"cannot write the ledger {self.place}: it is read-only; {remedy}")
        with self._translated(), self._engine.connect() as connection:
            connection = connection.execution_options(**{_WRITE: True}, **self._reach(across))
            transaction = connection.begin()
            try:
                yield connection
            except BaseException:
                transaction.rollback()
                raise
            try:
                transaction.commit()
            except exc.DBAPIError as error:
                if error.connection_invalidated:
                    raise LostAnswerError(f"ledger {self.place}: no answer to a commit") from error
                raise

    def _reach(self, across: str) -> dict[str, str]:
        """Return the execution options of a connection, which take precedence over those of a statement."""
        return {ACROSS: across} if across else {OF: self._project}

    def close(self) -> None:
        """Close every connection, and delete the copy of a read-only ledger."""
        self._engine.dispose()
        if self._copy is not None:
            self._copy.cleanup()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Serialise processes on PostgreSQL, for decisions that no compare-and-set covers."""
        with self.write() as connection:
            hold_off_others(connection)
            yield

    @contextmanager
    def locked(self, key: int, *, alone: bool, patience: float, by: str) -> Iterator[None]:
        """Hold an advisory lock of PostgreSQL in a dedicated session, which releases it when this process dies.

        Args:
            by: a description of possible holders, for the error after a timeout.

        Raises:
            DeadlineError: other processes held the lock for longer than `patience` seconds.
        """
        asked = f"SELECT pg_try_advisory_lock{'' if alone else '_shared'}({key})"
        deadline = time.monotonic() + patience
        with self._translated(), self._engine.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.detach()  # the pool must never reuse a session that holds the lock
            while not connection.exec_driver_sql(asked).scalar_one():
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"ledger {self.place}: {by} for more than {patience:g} s; nothing is lost, "
                        "run the command again"
                    )
                time.sleep(0.02)
            try:
                yield
            finally:  # the end of the session also releases it, a moment later
                with suppress(exc.SQLAlchemyError):
                    connection.exec_driver_sql(f"SELECT pg_advisory_unlock{'' if alone else '_shared'}({key})")

    def product(self) -> tuple[str, str]:
        """Return the database's name and version, and the settings that let a power cut lose commits ("": none)."""
        if self._sqlite:
            return f"SQLite {sqlite3.sqlite_version}", ""
        with self.read() as connection:
            return postgres.product(connection)

    def overwrite(self) -> bool:
        """Rewrite the tables that contain words, so that no deleted word is left in the file or its log.

        Returns:
            False if another process reads an older state, or the database rejects the operation; try again later.
        """
        connection = self._engine.raw_connection()
        failure: type[Exception] = self._engine.dialect.dbapi.Error  # type: ignore[union-attr]
        try:
            if self._sqlite:
                connection.cursor().execute("VACUUM")
                blocked, *_ = connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() or (1,)
                return not blocked
            connection.dbapi_connection.autocommit = True  # type: ignore[union-attr]
            for name in (payloads.name, work.name, *(name for name, one in TABLES.items() if one.words)):
                connection.cursor().execute(f"VACUUM FULL {name}")
        except failure:
            return False
        finally:
            connection.invalidate()
            connection.close()
        return True

    def check(self) -> list[str]:
        """Return the errors that the database finds in its pages, indexes and references, one line each."""
        if not self._sqlite:
            return []  # PostgreSQL checks its pages when it reads them
        with self.read() as connection:
            found = [str(row[0]) for row in connection.exec_driver_sql(f"PRAGMA integrity_check({_COMPLAINTS})")]
            dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_COMPLAINTS)
        lines = [] if found == ["ok"] else found
        return lines + [f"a row of {row[0]} names a row of {row[2]} that does not exist" for row in dangling]

    def _reader(self, file: Path) -> Callable[[], sqlite3.Connection]:
        """Return the function that opens a read-only ledger.

        SQLite needs two files next to the ledger, which SQLite creates and removes as needed. If these files exist,
        another process has the ledger open, and this process reads with the files. If they do not exist, no process
        has the ledger open, and the ledger file is complete. A log that a killed process left without its index can
        only be read in a copy.
        """
        address = f"file:{quote(str(file.absolute()))}?mode=ro"
        log = file.with_name(file.name + "-wal")
        if log.exists() and log.stat().st_size and not file.with_name(file.name + "-shm").exists():
            self._copy = tempfile.TemporaryDirectory(prefix="posttrain-ledger-")
            for part in (file, log):
                shutil.copyfile(part, Path(self._copy.name, part.name))
            address = f"file:{quote(str(Path(self._copy.name, file.name)))}"
        elif not log.exists():
            address += "&immutable=1"
        return lambda: sqlite3.connect(address, uri=True, check_same_thread=False)

    def _on_connect(self, connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions: `_on_begin` does
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(self._busy * 1000)}")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        for statement in () if self.read_only else TRIGGER:
            cursor.execute(statement)
        cursor.close()

    def _on_begin(self, connection: Connection) -> None:
        write = connection.get_execution_options().get(_WRITE, False)
        driver: Any = connection.connection.driver_connection  # SQLAlchemy's overhead exceeds the time of the statement
        driver.execute("BEGIN IMMEDIATE" if write else "BEGIN")

    def _prepare(self) -> None:
        if self._sqlite and not self.read_only:
            self._use_write_ahead_log()
        with self.read() as connection:
            version = schema_version(connection)
            if version is not None and version >= SCHEMA_VERSION:
                _refuse_newer(connection, version)
                if not self._sqlite:
                    self.read_only = not postgres.may_write(connection, events.name)
                return
        if version is not None:
            raise WorkspaceError(
                f"ledger {self.place} has schema {version}, but this version of Posttrain needs {SCHEMA_VERSION}; "
                "use the Posttrain version that created it, or `posttrain init` in another folder"
            )
        if not self._create:
            raise WorkspaceError(f"ledger {self.place} is empty: it was truncated; restore it from a copy")
        with self.write(across="a ledger is made") as connection:
            hold_off_others(connection)
            if schema_version(connection) is None:
                make_tables(connection)
                tell_rows(connection, self.clock, os.urandom)

    def _use_write_ahead_log(self) -> None:
        """Switch the file to a write-ahead log, if needed; wait for other processes, because SQLite does not wait."""
        deadline = time.monotonic() + self._busy
        while True:
            connection = self._engine.raw_connection()
            try:
                if connection.cursor().execute("PRAGMA journal_mode").fetchone() == ("wal",):
                    return
                connection.cursor().execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if _sqlite_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
            finally:
                connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except exc.IntegrityError as error:
            raise ConflictError(
                f"the ledger rejected a row: {_line(error.orig)}; another process wrote the row first; read it again"
            ) from error
        except exc.DBAPIError as error:
            raise self._translate(error.orig) from error
        except exc.TimeoutError as error:
            raise LedgerUnavailableError(
                f"ledger {self.place}: all connections of this process are in use; try again later"
            ) from error
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: BaseException | None) -> PosttrainError:
        if not self._sqlite:
            return postgres.translate(error, self.place, self._busy)
        code = _sqlite_code(error)
        if code == sqlite3.SQLITE_IOERR and shutil.disk_usage(Path(self.place).parent).free < _FULL_BYTES:
            code = sqlite3.SQLITE_FULL  # SQLite reports an I/O error if its shared memory cannot grow
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return DeadlineError(
                f"ledger {self.place} was locked by another process for more than {self._busy:g} s; "
                "run the command again"
            )
        reason = {
            sqlite3.SQLITE_FULL: "the disk is full; free some space and run the command again",
            sqlite3.SQLITE_READONLY: "it is read-only; make the file and its folder writable",
            sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that its folder exists and is writable",
            sqlite3.SQLITE_IOERR: f"the disk failed ({_line(error)}); check its free space and its health",
            sqlite3.SQLITE_NOTADB: "it is not a database; restore it from a copy",
            sqlite3.SQLITE_CORRUPT: "it is damaged; restore it from a copy",
        }.get(code, f"{_line(error)}; check its address and its schema")
        return WorkspaceError(f"cannot use the ledger {self.place}: {reason}")


def hold_off_others(connection: Connection) -> None:
    """Serialise transactions until this one ends, e.g. to create the ledger. SQLite always has one writer."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MAKING})")


def make_tables(connection: Connection) -> None:
    """Create every table, and the initial rows of a ledger, in the transaction of `connection`."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(insert(projects).values(id=DEFAULT_PROJECT, created_at=0.0))
    connection.execute(insert(tree_head).values(id=1, size=0, root=EMPTY, peaks=b""))
    connection.execute(insert(schema_versions).values(version_num=SCHEMA_VERSION, usable_since=USABLE_SINCE))


def _url(location: str | Path) -> URL:
    address = str(location)
    if isinstance(location, Path) or "://" not in address:
        return URL.create("sqlite", database=address)
    try:
        url = make_url(address)
    except (exc.ArgumentError, ValueError) as error:  # such as a port that is not a number
        raise WorkspaceError("ledger address must be a path or a URL postgresql://user@host/database") from error
    if url.get_backend_name() != "sqlite" and not postgres.is_address(address):
        raise WorkspaceError(f"ledger address must be a path or begin with postgresql://, got {url.drivername}://")
    if url.get_backend_name() != "sqlite":
        postgres.refuse_secrets(url)
    return postgres.with_driver(url)


def schema_version(connection: Connection) -> str | None:
    """Return the schema version of a ledger; None if it has no tables."""
    if not inspect(connection).has_table(schema_versions.name):
        return None
    return connection.execute(select(schema_versions.c.version_num)).scalar()


def _refuse_newer(connection: Connection, version: str) -> None:
    """Reject a ledger of a newer version of Posttrain, unless the ledger records that this version may use it.

    Raises:
        WorkspaceError: this version must not use the ledger.
    """
    if version == SCHEMA_VERSION:
        return
    since = connection.execute(select(schema_versions.c.usable_since)).scalar()
    if since is None or since > SCHEMA_VERSION:
        raise WorkspaceError(
            f"workspace schema {version} is newer than this Posttrain ({SCHEMA_VERSION}); upgrade posttrain"
        )


def _sqlite_code(error: BaseException | None) -> int:
    """Return the primary result code (low byte) of a SQLite error; -1 for other errors."""
    code = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else int(code) & 0xFF


def _line(error: BaseException | None) -> str:
    return " ".join(str(error).split())
