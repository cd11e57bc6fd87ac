"""The sealer, which assigns committed events their place in the Merkle tree, and heads that detect a lost tail.

Writers append events with leaves and without numbers, so writers are not serialised; afterwards one sealer at a time
numbers the committed events, without gaps. The sealer inserts leaves and complete tiles, and updates the head. The row
`tree_head` is the lock, which the sealer holds during its transaction, and the proof of the tail: without the head, a
log that has lost its last events would be valid, only shorter.

Heads of the event log are also stored outside the ledger: in the artifact store and in the orders of attempts. If a
ledger loses its tail (e.g. its write-ahead log was removed) or is replaced by an older copy, the ledger is consistent
and its log verifies: only records outside the ledger show the loss. The store has one small object,
`heads/LOG/SIZE-ROOT`, written when a command or a run ends; if there are several such objects, each one counts, so no
writer can shorten the log. An order (`job.json`) contains the head at the launch of its job. A job can write its
folder, so orders can only add to the evidence of a loss. The run folders themselves show runs and attempts that the
ledger lacks.

A user accepts an intended loss, with a reason; the event of the acceptance names the heads and attempts to ignore.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    and_,
    collate,
    delete,
    insert,
    or_,
    select,
    type_coerce,
    update,
)

from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.ids import TYPES
from posttrain.domain.ports import crashpoint
from posttrain.store.atomic import ANSWER, read_untrusted
from posttrain.store.blobs import ObjectBlobs
from posttrain.store.journal import CREATED, ERASED, FIELDS, Payload, envelope_leaf
from posttrain.store.ledger import Ledger
from posttrain.store.schema import attempts, events, leaves, payloads, tiles, tree_head, unsealed
from posttrain.store.trees import LEVELS, Tree

_BATCH = 4096
_WAITING = (  # foreign rows in `unsealed` are left for `verify` to report
    select(events.c.id, events.c.leaf)
    .join(unsealed, unsealed.c.event == events.c.id)
    .outerjoin(leaves, leaves.c.event == events.c.id)
    .where(leaves.c.event.is_(None))
)
_AS_WRITTEN = (  # an event and its words, as text, so that an unreadable value is reported and does not raise
    events.c.leaf.label("written"),
    *(type_coerce(events.c[name], Text) if name == "audited" else events.c[name] for name in FIELDS),
    payloads.c.retention,
    payloads.c.salt,
    type_coerce(payloads.c.body, Text).label("body"),
)
ACCEPTED, SUBJECT = "ledger.loss_accepted", "ledger"
_FOLDER, _DIGITS, _SHOWN = "heads", 16, 10
_HEAD = re.compile(rf"[0-9]{{{_DIGITS}}}-[0-9a-f]{{64}}")
_ATTEMPT = (
    re.compile(  # RUN/STAGE/NUMBER as created by submission; other folders below runs/ are copies or a user's files
        rf"(?=[^/]+-[a-z0-9]{{8}}/){TYPES['RunId'].pattern}/{TYPES['StageName'].pattern}/[0-9]{{3,9}}"
    )
)
_WHY = "the log is of every project"
_REMEDY = "restore the newest copy of the ledger, or accept the loss: posttrain doctor --accept-loss REASON"


@dataclass(frozen=True, slots=True)
class TreeReport:
    """A valid log: `sealed` events under `root`, and `pending` events that are not sealed yet."""

    sealed: int
    root: str
    pending: int
    erased: int = 0  # number of events whose words were erased, as later events record


def seal(ledger: Ledger) -> int:
    """Seal all events committed so far and return their number. Safe to call from anywhere, at any time."""
    total = 0
    while _waits(ledger):
        with ledger.database.write(across="the log is of every project") as connection:
            total += _seal_batch(connection)
            crashpoint("sealer.before_commit")
    return total


def _waits(ledger: Ledger) -> bool:
    with ledger.database.read(across="the log is of every project") as connection:
        return connection.execute(_WAITING.limit(1)).first() is not None


def _seal_batch(connection: Connection) -> int:
    head = connection.execute(select(tree_head).with_for_update()).one()
    found = connection.execute(_WAITING.order_by(events.c.id).limit(_BATCH)).all()
    if not found:  # another sealer has sealed them
        return 0
    tree = Tree.of(head.size, head.peaks)
    placed = [
        {"sequence": sequence, "event": row.id, "leaf": row.leaf} for sequence, row in enumerate(found, head.size + 1)
    ]
    connection.execute(insert(leaves), placed)
    complete = tree.add(row.leaf for row in found)
    if complete:
        connection.execute(insert(tiles), [asdict(tile) for tile in complete])
    sealed = select(leaves.c.event).where(leaves.c.sequence > head.size)
    connection.execute(delete(unsealed).where(unsealed.c.event.in_(sealed)))
    connection.execute(update(tree_head).values(size=tree.size, root=tree.root, peaks=tree.packed))
    return len(found)


class _Erasures:
    """The words that the log records as erased (read at the first missing words), and the number found missing."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self.met = connection, 0

    @functools.cached_property
    def _words(self) -> set[str]:
        query = select(type_coerce(events.c.audited, Text)).where(events.c.kind == ERASED)
        found = set[str]()
        for audited in self._connection.execute(query).scalars():
            try:
                found |= set(json.loads(audited).get("erased", ()))
            except (ValueError, TypeError, AttributeError):  # the check of that event reports it
                continue
        return found

    def has(self, words: str) -> bool:
        """Return whether these words may be missing."""
        self.met += words in self._words
        return words in self._words


def root_at(connection: Connection, size: int) -> bytes | None:
    """Return the root over the first `size` leaves, from tiles and later leaves; None if there are fewer leaves."""
    peaks, at = list[bytes](), 0
    for level in reversed(range(-(-size.bit_length() // LEVELS))):
        wanted = size >> LEVELS * level & (1 << LEVELS) - 1
        found = _hashes(connection, level, at >> LEVELS * level, wanted) if wanted else []
        if len(found) != wanted:
            return None
        part = Tree()
        part.add(found)
        peaks += part.peaks
        at += wanted << LEVELS * level
    return Tree(size, peaks).root


def _hashes(connection: Connection, level: int, first: int, number: int) -> list[bytes]:
    """Return up to `number` roots over 256^level leaves each, beginning with place `first`."""
    place, kept = (leaves.c.sequence, leaves.c.leaf) if level == 0 else (tiles.c.position, tiles.c.hash)
    first += level == 0  # sequences start at 1
    query = select(kept).where(place >= first, place < first + number).order_by(place)
    query = query.where(tiles.c.level == level - 1) if level else query
    return list(connection.execute(query).scalars())


def verify_chain(ledger: Ledger) -> TreeReport:
    """Recompute every leaf from its envelope and words, every tile, and the head.

    Raises:
        IntegrityError: an event, words, a leaf, a tile or the head was changed, moved or removed. The error names the
            first bad sequence.
    """
    with ledger.database.read(across="the log is of every project") as connection:
        tree, erased = Tree(), _Erasures(connection)
        kept = {(row.level, row.position): row.hash for row in connection.execute(select(tiles))}
        for row in _sealed(connection):
            _check(tree.size + 1, row, erased)
            if tree.size == 0:
                _check_beginning(row)
            for tile in tree.add([row["leaf"]]):
                if kept.pop((tile.level, tile.position), None) != tile.hash:
                    raise _broken(tree.size, f"tile {tile.position} of level {tile.level} does not match its leaves")
        _check_head(connection, tree, kept)
        pending = _check_pending(connection, tree.size, erased)
    return TreeReport(tree.size, DIGEST_PREFIX + tree.root.hex(), pending, erased.met)


def verify_part(ledger: Ledger, names: Collection[str]) -> TreeReport:
    """Verify only the events of some runs and assets: each matches its leaf, and its leaf is in the tree.

    The number of rows read grows with these events and with the logarithm of the log's length. Only `verify_chain`
    detects that such an event was removed together with its leaf.

    Args:
        names: ids of runs and refs of assets.

    Raises:
        IntegrityError: see `verify_chain`.
    """
    with ledger.database.read(across="leaves and tiles are of every project") as connection:
        erased, mine = _Erasures(connection), of_subjects(connection, ledger.project, names)
        head, sequences = connection.execute(select(tree_head)).one(), []
        for row in _sealed(connection, mine):
            _check(row["sequence"], row, erased)
            sequences.append(row["sequence"])
        _prove(connection, sequences, head.size)
        if root_at(connection, head.size) != head.root:
            raise _broken(head.size, "its head does not match its leaves and tiles")
        pending = _check_pending(connection, head.size, erased, mine)
    return TreeReport(len(sequences), DIGEST_PREFIX + head.root.hex(), pending, erased.met)


def of_subjects(connection: Connection, project: str, names: Collection[str]) -> ColumnElement[bool]:
    """Return the condition for events of runs with their stages and attempts, and of assets, in one project."""
    subject = events.c.subject  # order of code points, so that PostgreSQL can use the index
    ordered = collate(subject, "C") if connection.dialect.name == "postgresql" else subject
    runs = [name for name in sorted(names) if ":" not in name]
    below = (and_(ordered >= f"{run}/", ordered < f"{run}0") for run in runs)  # 0 follows /
    return and_(events.c.project == project, or_(subject.in_(sorted(names)), *below))


def _prove(connection: Connection, sequences: Iterable[int], size: int) -> None:
    """Verify, from these leaves upwards, the blocks of leaves and of tiles that complete tiles cover.

    Leaves that no complete tile covers are part of the head.
    """
    level, wanted = 0, {sequence - 1 for sequence in sequences}
    while wanted := {place >> LEVELS for place in wanted if (place >> LEVELS) + 1 << LEVELS * (level + 1) <= size}:
        for block in sorted(wanted):
            part = Tree()
            part.add(_hashes(connection, level, block << LEVELS, 1 << LEVELS))
            if [part.root] != _hashes(connection, level + 1, block, 1):
                raise _broken(
                    (block << LEVELS * (level + 1)) + 1,
                    f"tile {block} of level {level} does not match the hash above it",
                )
        level += 1


def _sealed(connection: Connection, *where: ColumnElement[bool]) -> Iterator[Mapping[str, Any]]:
    """Yield every leaf with its event and words; missing values are None."""
    query = select(leaves.c.sequence, leaves.c.event, leaves.c.leaf, *_AS_WRITTEN)
    query = query.outerjoin(events, events.c.id == leaves.c.event).outerjoin(payloads, payloads.c.event == events.c.id)
    rows = connection.execute(query.where(*where).order_by(leaves.c.sequence).execution_options(yield_per=_BATCH))
    yield from (dict(row) for row in rows.mappings())


def _check(sequence: int, row: Mapping[str, Any], erased: _Erasures) -> None:
    if row["sequence"] != sequence:
        raise _broken(sequence, f"the next leaf has sequence {row['sequence']}")
    if row["written"] is None:
        raise _broken(sequence, "its event is missing")
    if row["written"] != row["leaf"]:
        raise _broken(sequence, "its leaf does not match its event")
    _check_event(row, erased, lambda what: _broken(sequence, what))


def _check_event(row: Mapping[str, Any], erased: _Erasures, broken: Callable[[str], IntegrityError]) -> None:
    """Check that an event matches its leaf, and its words match the event."""
    try:
        found = envelope_leaf({**row, "audited": json.loads(row["audited"])})
    except (ValueError, TypeError, InputError, RecursionError) as error:
        raise broken("its envelope cannot be read") from error
    if found != row["written"]:
        raise broken("its envelope does not match its leaf")
    if row["words"] is None and row["body"] is not None:
        raise broken("it has words that its envelope does not name")
    if row["words"] is None:
        return
    if row["body"] is None:
        if erased.has(row["words"]):
            return
        raise broken("its words are missing")
    try:
        said = Payload(row["retention"], row["salt"], json.loads(row["body"])).digest
    except (ValueError, TypeError, InputError, RecursionError) as error:
        raise broken("its words cannot be read") from error
    if said != row["words"]:
        raise broken("its words do not match its envelope")


def _check_beginning(first: Mapping[str, Any]) -> None:
    """Reject a log that continues a log of schema 0001, because it depends on events that are not verified here."""
    if first["kind"] != CREATED:
        raise _broken(1, f"a log must begin with {CREATED}, got {first['kind']}")


def _check_head(connection: Connection, tree: Tree, kept: Mapping[tuple[int, int], bytes]) -> None:
    if kept:
        level, position = next(iter(kept))
        raise _broken(tree.size, f"tile {position} of level {level} has no leaves")
    head = connection.execute(select(tree_head)).one_or_none()
    if head is None:
        raise _broken(tree.size + 1, "the head is missing")
    if (head.size, head.root, head.peaks) != (tree.size, tree.root, tree.packed):
        ends = head.size if isinstance(head.size, int) else tree.size
        raise _broken(min(tree.size, ends) + 1, f"the log ends at {tree.size}, its head records {head.size}")


def _check_pending(connection: Connection, size: int, erased: _Erasures, *where: ColumnElement[bool]) -> int:
    """Check that unsealed events match their leaves, and that each event is sealed or waits; return how many wait."""
    query = select(events.c.id, unsealed.c.event.label("waits"), *_AS_WRITTEN)
    query = query.outerjoin(leaves, leaves.c.event == events.c.id).outerjoin(unsealed, unsealed.c.event == events.c.id)
    query = query.outerjoin(payloads, payloads.c.event == events.c.id).where(leaves.c.event.is_(None), *where)
    pending = 0
    for row in connection.execute(query.order_by(events.c.id)).mappings():
        number = int(row["id"])
        if row["waits"] is None:
            raise _broken(size + 1, f"event {number} is neither sealed nor waiting to be sealed")

        def broken(what: str, number: int = number) -> IntegrityError:
            return _broken(size + 1, f"of event {number}, which waits to be sealed, {what}")

        _check_event(dict(row), erased, broken)
        pending += 1
    strays = select(unsealed.c.event).outerjoin(leaves, leaves.c.event == unsealed.c.event)
    strays = strays.outerjoin(events, events.c.id == unsealed.c.event)
    stray = connection.execute(strays.where(leaves.c.event.is_not(None) | events.c.id.is_(None))).scalar()
    if stray is not None:
        raise _broken(size + 1, f"event {stray} waits to be sealed, but is sealed already or was never written")
    return pending


def _broken(sequence: int, what: str) -> IntegrityError:
    return IntegrityError(f"event log is broken at sequence {sequence}: {what}; restore the ledger from a copy")


@dataclass(frozen=True, slots=True)
class Lost:
    """Records outside the ledger that the ledger lacks: heads as `SIZE-ROOT`, attempts as `RUN/STAGE/NUMBER`."""

    size: int  # size of the ledger's log
    heads: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()
    kept: int = 0  # number of heads in the store, of any log
    named: bool = True  # whether `lines` names runs; False for members of one of several projects

    def __bool__(self) -> bool:
        return bool(self.heads or self.attempts)

    def lines(self) -> Iterator[str]:
        """Yield one line about lost events and one line about lost attempts, if there are any."""
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
    """Return a head as `SIZE-ROOT`, the size with leading zeros, so that names sort by size."""
    return f"{size:0{_DIGITS}d}-{root.hex()}"


def keep_head(ledger: Ledger, blobs: ObjectBlobs, log: str) -> None:
    """Store the head, and delete smaller heads that the log contains; all other heads stay.

    Args:
        log: identifies this ledger among the ledgers that keep heads in the same store.

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
    """Compare the ledger with the heads and run folders outside it.

    Args:
        log: see `keep_head`.
        root: the workspace folder.
        run_id: the only run whose folder is read; `*`: all runs.
    """
    folders = dict(_folders(root, run_id))  # read before the log, which only grows
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
    """Record the current loss as accepted, and drop the lost heads from the store.

    Raises:
        InputError: nothing is missing, or there is no reason.
    """
    lost = find_lost(ledger, blobs, log, root)
    if not lost or not reason.strip():
        raise InputError(
            "--accept-loss: "
            f"{'a reason is required, got none; add it' if lost else 'nothing was lost; remove the option'}"
        )
    with ledger.transaction(actor) as transaction:
        transaction.append_event(
            ACCEPTED, SUBJECT, {"heads": list(lost.heads), "attempts": list(lost.attempts)}, {"reason": reason}
        )
    for head in _kept(blobs, log) & set(lost.heads):
        blobs.drop_note(f"{_FOLDER}/{log}/{head}")
    return lost


def _kept(blobs: ObjectBlobs, log: str) -> set[str]:
    """Return the heads in the store; objects with other names are ignored."""
    return set(filter(_HEAD.fullmatch, blobs.notes(f"{_FOLDER}/{log}")))


def _contains(connection: Connection, head: str) -> bool:
    """Return whether the ledger's log begins with the log of this head."""
    size, _, root = head.partition("-")
    found = root_at(connection, int(size))
    return found is not None and found.hex() == root


def _accepted(connection: Connection, what: str) -> set[str]:
    query = select(type_coerce(events.c.audited, Text)).where(events.c.subject == SUBJECT, events.c.kind == ACCEPTED)
    return {str(one) for audited in connection.execute(query).scalars() for one in json.loads(audited).get(what, ())}


def _folders(root: Path, run_id: str) -> Iterator[tuple[str, str]]:
    """Yield every attempt that has a folder, with the head in its order; empty: the order has no valid head."""
    for path in (root / "runs").glob(f"{run_id}/*/[0-9]*/job.json"):
        run, stage, number = path.parts[-4:-1]
        if not _ATTEMPT.fullmatch(f"{run}/{stage}/{number}"):
            continue
        said: object = ""
        # the job can write anything there
        with suppress(OSError, ValueError, IntegrityError, AttributeError, RecursionError):
            said = json.loads(read_untrusted(path, ANSWER)).get("log_head", "")
        yield f"{run}/{stage}/{int(number)}", said if isinstance(said, str) and _HEAD.fullmatch(said) else ""
