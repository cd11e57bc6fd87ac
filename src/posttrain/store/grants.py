"""Tokens with which a running job reads its inputs from a server, and browser sessions.

A job's token is for one attempt, and only the token's digest is stored. The token becomes invalid when the attempt
ends, when another attempt of the stage begins, or when the token is not renewed. For each request, any server of the
ledger looks up the token in one statement.

A job on another machine begins with a bootstrap token, which redeems the job's token. When the job has begun, the
tokens of its earlier incarnations become invalid.

`Granting` issues the tokens of one host's jobs, and renews them.

A session maps a browser's secret to a token; only the digest of the secret is stored.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, insert, not_, select, update

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import InfrastructureError, PosttrainError
from posttrain.domain.lifecycle import AttemptState, is_final
from posttrain.domain.ports import Clock
from posttrain.domain.records import AttemptRecord
from posttrain.store.atomic import read_json
from posttrain.store.database import Database, now_in
from posttrain.store.ledger import Host, Ledger
from posttrain.store.retries import INSIDE, SOCKET, Bootstrap, JobAccess, tell
from posttrain.store.schema import attempts, grants, keyed, runs, sessions, tokens

log = logging.getLogger("posttrain.driver")
PREFIX, BOOTSTRAP_PREFIX = "posttrain_job_", "posttrain_bootstrap_"
RENEW_SECONDS = 60.0  # seconds between two renewals of grants
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
SECONDS = 900.0  # validity of a grant without renewal
_KEPT = 86400.0  # seconds that an expired grant is kept, because a returning driver may renew it
_LIVE = [state for state in AttemptState if not is_final("attempt", state)]
MOST = 20  # maximum sessions of a token, and bootstrap tokens of an attempt


@dataclass(frozen=True, slots=True)
class Granted:
    """The attempt that owns a token."""

    project: str
    run_id: str
    stage: str
    number: int
    resume: str | None  # digest of the checkpoint from which the attempt resumes

    @property
    def name(self) -> str:
        """The external name of the attempt's job."""
        return f"{self.run_id}-{self.stage}-{self.number}"


class Grants:
    """The grants of a ledger, of every project."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def add(self, attempt: AttemptRecord, digest: str, *, bootstrap: bool = False) -> None:
        """Grant the access of the attempt to the holder of the secret with this digest.

        Args:
            bootstrap: whether the secret opens nothing, and only redeems the secret of a job.
        """
        key = {"run_id": attempt.run_id, "stage": attempt.stage, "number": attempt.number}
        with self._database.write(across="an attempt is of one project") as connection:
            self._add(connection, digest, key, bootstrap=int(bootstrap))
            if bootstrap:  # one for each submission; a cluster may refuse the job for days
                mine = (*keyed(grants, **key), grants.c.bootstrap == 1)
                newest = select(grants.c.digest).where(*mine).order_by(grants.c.expires_at.desc()).limit(MOST)
                kept = connection.execute(newest).scalars().all()
                connection.execute(delete(grants).where(*mine, grants.c.digest.not_in(kept)))

    def redeem(self, bootstrap: str, digest: str) -> bool:
        """Give the access of an attempt to the holder of a new secret too; return whether the bootstrap token is valid.

        Args:
            bootstrap: digest of the bootstrap token.
            digest: digest of the new secret.
        """
        found = self.known(bootstrap, bootstrap=True)
        if found is not None:
            key = {"run_id": found.run_id, "stage": found.stage, "number": found.number}
            with self._database.write() as connection:
                self._add(connection, digest, key)
        return found is not None

    def settle(self, digest: str, attempt: Granted) -> None:
        """Revoke the access of every other holder, when the attempt's newest job has begun.

        Args:
            digest: digest of that job's secret.
        """
        mine = keyed(grants, run_id=attempt.run_id, stage=attempt.stage, number=attempt.number)
        with self._database.write(across="a secret names its run") as connection:
            jobs = (*mine, grants.c.bootstrap == 0)
            spent = connection.execute(select(func.max(grants.c.put_bytes)).where(*jobs)).scalar()
            connection.execute(delete(grants).where(*jobs, grants.c.digest != digest))
            connection.execute(update(grants).where(grants.c.digest == digest).values(put_bytes=spent or 0))

    def _add(self, connection: Connection, digest: str, key: Mapping[str, Any], **values: int) -> None:
        until = now_in(connection, self._clock) + SECONDS
        row = {"digest": digest, "expires_at": until, "put_bytes": 0, "bootstrap": 0, **key, **values}
        connection.execute(insert(grants).values(row))

    def known(self, digest: str, *, bootstrap: bool = False) -> Granted | None:
        """Return the attempt that owns the secret; None if the secret is not valid."""
        later = attempts.alias()
        newer = exists().where(
            later.c.run_id == grants.c.run_id, later.c.stage == grants.c.stage, later.c.number > grants.c.number
        )
        with self._database.read(across="a secret names its run") as connection:
            query = select(runs.c.project, grants.c.run_id, grants.c.stage, grants.c.number, attempts.c.resume)
            query = query.join(attempts, _of_attempt()).join(runs, runs.c.id == grants.c.run_id)
            good = grants.c.expires_at > now_in(connection, self._clock)
            row = connection.execute(
                query.where(
                    *(grants.c.digest == digest, grants.c.bootstrap == int(bootstrap), good),
                    *(attempts.c.state.in_(_LIVE), not_(newer)),
                )
            ).one_or_none()
        return Granted(*row) if row else None

    def count(self, digest: str, size: int, most: int) -> bool:
        """Count bytes that an attempt writes; return False, without counting, if they would exceed its limit.

        Args:
            digest: digest of the attempt's secret.
            most: maximum bytes over the whole attempt.
        """
        with self._database.write(across="a secret names its run") as connection:
            mine = (grants.c.digest == digest) & (grants.c.put_bytes <= most - size)
            done = connection.execute(update(grants).where(mine).values(put_bytes=grants.c.put_bytes + size))
            return done.rowcount == 1

    def renew(self, host: str | None) -> Sequence[str]:
        """Renew the grants of live attempts, delete those of ended attempts; return the folders of the live attempts.

        Args:
            host: the host whose attempts are meant, besides those that belong to no host.
        """
        with self._database.write(across="a host has jobs of every project") as connection:
            mine = attempts.c.host.is_(None) | (attempts.c.host == host)
            living = select(attempts.c.folder).join(grants, _of_attempt()).where(attempts.c.state.in_(_LIVE), mine)
            folders = list(connection.execute(living.distinct()).scalars())
            self._forget(connection)
            if folders:
                theirs = exists().where(_of_attempt(), attempts.c.state.in_(_LIVE), mine)
                connection.execute(
                    update(grants).where(theirs).values(expires_at=now_in(connection, self._clock) + SECONDS)
                )
        return folders

    def _forget(self, connection: Connection) -> None:
        living = exists().where(_of_attempt(), attempts.c.state.in_(_LIVE))
        connection.execute(
            delete(grants).where(not_(living) | (grants.c.expires_at < now_in(connection, self._clock) - _KEPT))
        )


def _of_attempt() -> ColumnElement[bool]:
    same = (attempts.c.run_id == grants.c.run_id, attempts.c.stage == grants.c.stage)
    return and_(*same, attempts.c.number == grants.c.number)


class Granting:
    """Grants the jobs of one host's driver access to the server.

    Args:
        root: the workspace's folder.
        place: the file with the server's address.
        host: the host whose attempts' grants are renewed; None if the ledger has only one host.
        peers: returns the hosts of the ledger.
    """

    def __init__(
        self, root: Path, place: Path, grants: Grants, host: str | None, peers: Callable[[], Sequence[Host]] = tuple
    ) -> None:
        self._root, self._place, self._grants, self._host, self._peers = root, place, grants, host, peers
        self._renewed = -RENEW_SECONDS
        self._told: dict[str, tuple[str, str]] = {}  # attempt folder → the server's address written there
        self._damaged: set[str] = set()  # folders for which an error was logged

    def give(self, attempt: AttemptRecord, folder: Path, *, boxed: bool = False) -> None:
        """See `control.jobs.Access.give`.

        Raises:
            InfrastructureError: the server has not recorded its address yet.
        """
        url, certificate = self._server()
        secret = PREFIX + secrets.token_urlsafe(32)
        self._grants.add(attempt, digest_bytes(secret.encode()))
        JobAccess(url, secret, certificate, f"{INSIDE}/{SOCKET}" if boxed else "").write(folder)

    def bootstrap(self, attempt: AttemptRecord) -> str:
        """See `control.jobs.Access.bootstrap`: a token, this server, and the other servers of the team.

        Raises:
            InfrastructureError: the server has not recorded its address yet.
        """
        url, certificate = self._server()
        secret = BOOTSTRAP_PREFIX + secrets.token_urlsafe(32)
        self._grants.add(attempt, digest_bytes(secret.encode()), bootstrap=True)
        team = [one.url for one in self._peers() if one.url and not one.gone]
        return Bootstrap(secret, tuple(dict.fromkeys((url, *team))), certificate).to_json()

    def keep(self) -> None:
        """Renew the grants of running jobs when due, and write the server's current address into the jobs' folders.

        Raises:
            PosttrainError: the ledger or the server is unreachable; call again later.
        """
        if time.monotonic() - self._renewed < RENEW_SECONDS:
            return
        place = self._server()
        folders = {name for name in self._grants.renew(self._host) if (self._root / name).is_dir()}
        self._renewed = time.monotonic()  # set first, because a job may have damaged its folder
        self._damaged &= folders
        self._told = {name: told for name, told in self._told.items() if name in folders}
        for name in sorted(folders):
            if self._told.get(name) == place:
                continue
            try:
                tell(self._root / name, *place)
                self._told[name] = place
                self._damaged.discard(name)
            except (PosttrainError, OSError) as error:
                if name not in self._damaged:
                    log.warning("a job cannot receive the server's address: %s", error)
                self._damaged.add(name)

    def _server(self) -> tuple[str, str]:
        said = read_json(self._place)
        try:
            parts, certificate = urlsplit(str(said["url"])), str(said.get("certificate", ""))
            host = _EVERYWHERE.get(str(parts.hostname), str(parts.hostname))
            shown = f"[{host}]" if ":" in host else host
            return f"{parts.scheme}://{shown}:{parts.port}", Path(certificate).read_text() if certificate else ""
        except (TypeError, KeyError, OSError) as error:
            raise InfrastructureError(
                f"{self._place}: does not contain the server's address, since the server is still starting; "
                "try again when it has started"
            ) from error


def begin_session(ledger: Ledger, digest: str, token_id: str, expires_at: float) -> None:
    """Store a session; delete expired sessions, and a token's oldest sessions if there are too many."""
    column = sessions.c
    newest = (
        select(column.digest)
        .where(column.token == token_id)
        .order_by(column.expires_at.desc(), column.digest)
        .limit(MOST - 1)
    )
    with ledger.database.write() as connection:
        connection.execute(select(tokens.c.id).where(tokens.c.id == token_id).with_for_update())  # one at a time
        connection.execute(delete(sessions).where(column.expires_at <= ledger.clock.now()))
        kept = connection.execute(newest).scalars().all()
        connection.execute(delete(sessions).where(column.token == token_id, column.digest.not_in(kept)))
        connection.execute(insert(sessions).values(digest=digest, token=token_id, expires_at=expires_at))


def end_session(ledger: Ledger, digest: str) -> None:
    """Delete a session; an unknown session is not an error."""
    with ledger.database.write() as connection:
        connection.execute(delete(sessions).where(sessions.c.digest == digest))
