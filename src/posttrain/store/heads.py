"""Heads of the event log that are kept outside the ledger: in the artifact store and in the orders of attempts.

A ledger that lost its tail (its write-ahead log was removed) or that was replaced by an older copy is whole and its log
holds: only what lies elsewhere shows the loss. The store has one small object, `heads/LOG/SIZE-ROOT`, written when a
command or a run ends; each of several counts, so no writer takes the log back. An order (`job.json`) holds the
head at its launch. A job owns its folder, so what an order says raises suspicion and never lowers it. The run folders
themselves show runs and attempts that the ledger lacks.

A loss that somebody meant is accepted with a reason, by an event that names what is missed no more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Text, select, type_coerce

from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.ids import TYPES
from posttrain.store.atomic import ANSWER, read_left
from posttrain.store.blobs import ObjectBlobs
from posttrain.store.ledger import Ledger
from posttrain.store.schema import attempts, events, tree_head
from posttrain.store.sealer import root_at

ACCEPTED, SUBJECT = "ledger.loss_accepted", "ledger"
_FOLDER, _DIGITS, _SHOWN = "heads", 16, 10
_HEAD = re.compile(rf"[0-9]{{{_DIGITS}}}-[0-9a-f]{{64}}")
_ATTEMPT = (
    re.compile(  # RUN/STAGE/NUMBER as submission makes them: what else lies below runs/ is a copy or somebody's own
        rf"(?=[^/]+-[a-z0-9]{{8}}/){TYPES['RunId'].pattern}/{TYPES['StageName'].pattern}/[0-9]{{3,9}}"
    )
)
_WHY = "the log is of every project"
_REMEDY = "restore the newest copy of the ledger, or accept the loss: posttrain doctor --accept-loss REASON"


@dataclass(frozen=True, slots=True)
class Lost:
    """What is kept elsewhere and missing in the ledger: heads as `SIZE-ROOT`, attempts as `RUN/STAGE/NUMBER`."""

    size: int  # of the ledger's log
    heads: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()
    kept: int = 0  # heads in the store, of any log
    named: bool = True  # whether lines name runs: not to members of one project where there are several

    def __bool__(self) -> bool:
        return bool(self.heads or self.attempts)

    def lines(self) -> Iterator[str]:
        """One line for the log, one for the runs."""
        if self.heads:
            most = max(int(head.partition("-")[0]) for head in self.heads)
            yield (
                f"event log: has {self.size} events and does not contain the {most} whose head is kept outside the "
                f"ledger: its tail was lost, or another copy was put in its place; {_REMEDY}"
            )
        if self.attempts:
            runs = sorted({attempt.partition("/")[0] for attempt in self.attempts})
            more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
            number = f"{len(self.attempts)} (posttrain doctor names the runs)"
            said = f"of {', '.join(runs[:_SHOWN])}{more}" if self.named else number
            yield f"runs/ holds attempts that the ledger does not have: {said}; {_REMEDY}"


def _present(connection: Connection) -> str:
    return head_name(*connection.execute(select(tree_head.c.size, tree_head.c.root)).one())


def head_name(size: int, root: bytes) -> str:
    """A head as `SIZE-ROOT`, the size with leading zeros: of two names the greater has the larger size."""
    return f"{size:0{_DIGITS}d}-{root.hex()}"


def keep_head(ledger: Ledger, blobs: ObjectBlobs, log: str) -> None:
    """Keep the head in the store, and drop smaller ones that it contains; others stay, whatever their size.

    Args:
        log: what tells this ledger from others that keep heads in the same store.

    Raises:
        UnavailableError, WorkspaceError: the store cannot be written.
    """
    folder = f"{_FOLDER}/{log}"
    with ledger.database.read(across=_WHY) as connection:
        head, known = _present(connection), _kept(blobs, log)
        smaller = [one for one in known if one < head and _contains(connection, one)]
    if head in known:
        return
    blobs.note(f"{folder}/{head}", head)
    for one in smaller:
        blobs.drop_note(f"{folder}/{one}")


def find_lost(ledger: Ledger, blobs: ObjectBlobs, log: str, root: Path, run_id: str = "*") -> Lost:
    """Compare the ledger with what is kept elsewhere.

    Args:
        log: as `keep_head`.
        root: the workspace folder.
        run_id: the only run whose folder is looked at; `*`: all.
    """
    folders = dict(_folders(root, run_id))  # first of all: the log only grows
    kept = _kept(blobs, log)
    heads = {*kept, *filter(None, folders.values())}
    with ledger.database.read(across=_WHY) as connection:
        gone, missed = _accepted(connection, "heads"), _accepted(connection, "attempts")
        size = int(_present(connection).partition("-")[0])
        bad = tuple(sorted(one for one in heads - gone if not _contains(connection, one)))
        rows = select(attempts.c.run_id, attempts.c.stage, attempts.c.number)
        rows = rows if run_id == "*" else rows.where(attempts.c.run_id == run_id)
        known = {f"{run}/{stage}/{number}" for run, stage, number in connection.execute(rows)}
    return Lost(size, bad, tuple(sorted(folders.keys() - known - missed)), len(kept))


def accept_loss(ledger: Ledger, blobs: ObjectBlobs, log: str, root: Path, actor: str, reason: str) -> Lost:
    """Say that what is missing is missed no more, and drop the heads of what was lost from the store.

    Raises:
        InputError: nothing is missing, or there is no reason.
    """
    lost = find_lost(ledger, blobs, log, root)
    if not lost or not reason.strip():
        raise InputError(
            f"--accept-loss needs a loss and a reason, got {'no reason' if lost else 'no loss'}; leave it out"
        )
    with ledger.transaction(actor) as transaction:
        facts = {"heads": list(lost.heads), "attempts": list(lost.attempts)}
        transaction.append_event(ACCEPTED, SUBJECT, facts, {"reason": reason})
    for head in _kept(blobs, log) & set(lost.heads):
        blobs.drop_note(f"{_FOLDER}/{log}/{head}")
    return lost


def _kept(blobs: ObjectBlobs, log: str) -> set[str]:
    """The heads in the store; objects of other names there are somebody else's."""
    return set(filter(_HEAD.fullmatch, blobs.notes(f"{_FOLDER}/{log}")))


def _contains(connection: Connection, head: str) -> bool:
    """Whether the ledger's log begins with the log that this head is of."""
    size, _, root = head.partition("-")
    found = root_at(connection, int(size))
    return found is not None and found.hex() == root


def _accepted(connection: Connection, what: str) -> set[str]:
    query = select(type_coerce(events.c.audited, Text)).where(events.c.subject == SUBJECT, events.c.kind == ACCEPTED)
    return {str(one) for audited in connection.execute(query).scalars() for one in json.loads(audited).get(what, ())}


def _folders(root: Path, run_id: str) -> Iterator[tuple[str, str]]:
    """Every attempt that has a folder, and the head that its order names; empty: it names none."""
    for path in (root / "runs").glob(f"{run_id}/*/[0-9]*/job.json"):
        run, stage, number = path.parts[-4:-1]
        if not _ATTEMPT.fullmatch(f"{run}/{stage}/{number}"):
            continue
        said: object = ""
        # its job may write anything there
        with suppress(OSError, ValueError, IntegrityError, AttributeError, RecursionError):
            said = json.loads(read_left(path, ANSWER)).get("log_head", "")
        yield f"{run}/{stage}/{int(number)}", said if isinstance(said, str) and _HEAD.fullmatch(said) else ""
