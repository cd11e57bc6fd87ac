"""Verification: hash the bytes of a lineage again, and compare the ledger with its event log."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from posttrain.control.lineage import Node, release_lineage
from posttrain.data.catalog import check_where_it_lies, external_versions, place_of
from posttrain.domain.errors import InfrastructureError, IntegrityError, NotFoundError, PosttrainError, WorkspaceError
from posttrain.store.audit import channels_of, verify_rows
from posttrain.store.external import EXTERNAL
from posttrain.store.garbage import erased_versions
from posttrain.store.ledger import Stores
from posttrain.store.sealer import Lost, TreeReport, verify_chain, verify_part
from posttrain.store.trees import verify_tree

_NOTHING = Lost(0)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`: the checked bytes and the mismatches."""

    checked: int  # distinct digests
    bytes: int
    events: int  # sealed events whose chain was recomputed
    problems: tuple[str, ...] = field(default=())
    pending: int = 0  # events that are not sealed yet, and therefore not verified
    erased: int = 0  # events whose words were erased
    elsewhere: tuple[str, ...] = field(default=())  # external bytes that could not be verified from this machine
    channels: tuple[str, ...] = field(default=())  # channels whose live releases were verified, if no target was named


def verify(stores: Stores, lineage: Callable[[], Node], lost: Lost = _NOTHING, run_id: str = "") -> VerifyReport:
    """Recompute the event log; compare the ledger's rows with it; hash all bytes of a lineage again, each once.

    Problems are collected, not raised. Rows are compared first, because the lineage is read from them.

    Args:
        lost: facts that are stored outside the ledger and missing from it.
        run_id: the run of the lineage. The events and rows of this run, and of the runs and assets that the lineage
            names, are verified by proofs, at a cost that does not depend on other runs.

    Raises:
        PosttrainError: the lineage cannot be read although the ledger matches its log.
    """
    chain, problems = _check_ledger(stores, lost, {run_id} - {""})
    try:
        trees = [lineage()]
    except PosttrainError:
        edited = problems if run_id else [one for one in problems if one.startswith("release ")]
        if not edited:  # an edited release may hide its channel
            raise
        trees, problems = [], [*problems, "the lineage cannot be read from these rows"]
    if run_id and not problems:
        chain, problems = _check_ledger(
            stores, lost, {run_id, *(name for tree in trees for node in tree.walk() for name in _named(node))}
        )
    return _hash(stores, trees, chain, problems)


def verify_live(stores: Stores, lost: Lost = _NOTHING) -> VerifyReport:
    """Verify the live release of every channel, as `verify` does; an unreadable lineage is reported as a problem."""
    chain, found = _check_ledger(stores, lost)
    trees, problems, names = [], [], stores.ledger.channels()
    for name in names:
        try:
            trees.append(release_lineage(stores, name))
        except PosttrainError as error:
            problems.append(f"channel {name}: {error}")
    return replace(_hash(stores, trees, chain, [*problems, *found]), channels=tuple(names))


def _hash(stores: Stores, trees: Sequence[Node], chain: TreeReport | None, found: Sequence[str]) -> VerifyReport:
    problems, elsewhere, seen, size = list[str](), list[str](), set[str](), 0
    with stores.ledger.database.read() as connection:
        gone = {name for _, name in erased_versions(connection, stores.ledger.project)}
    for node in (node for tree in trees for node in tree.walk()):
        if node.digest is None or node.form is None or node.digest in seen:
            continue
        seen.add(node.digest)
        try:
            size += _hashed(stores, node.digest, node.form, node.name, elsewhere)
        except (NotFoundError, IntegrityError) as error:
            if isinstance(error, NotFoundError) and node.name in gone:
                elsewhere.append(f"{node.name}: was erased, and its bytes deleted")
            else:
                problems.append(_of_node(node, error))
    report = VerifyReport(len(seen) - len(elsewhere), size, 0, (*problems, *found), elsewhere=tuple(elsewhere))
    return replace(report, events=chain.sealed, pending=chain.pending, erased=chain.erased) if chain else report


def _check_ledger(stores: Stores, lost: Lost, names: Set[str] = frozenset()) -> tuple[TreeReport | None, list[str]]:
    """Return the report on the event log, if it could be read, and the problems of log, rows and database.

    Args:
        names: the runs (with the channels to which they were released) and assets to read; empty: the whole log.
    """
    chain, problems = None, list(lost.lines())
    try:
        names = names | channels_of(stores.ledger, names) if names else names
        problems += (
            [] if names else [f"ledger: {line}; restore it from a copy" for line in stores.ledger.database.check()]
        )
        chain = verify_part(stores.ledger, names) if names else verify_chain(stores.ledger)
        verify_rows(stores.ledger, names)
    except (IntegrityError, WorkspaceError) as error:  # WorkspaceError: the database cannot be read further
        problems.append(str(error))
    return chain, problems


def _named(node: Node) -> Iterator[str]:
    """Yield the runs or assets from whose rows a node of a lineage is read."""
    details = dict(node.details)
    for name in (node.name, details.get("registered as", ""), details.get("made by", "").rpartition(" in ")[2]):
        if name:
            yield name if ":" in name else name.partition("/")[0]


def _of_node(node: Node, error: PosttrainError) -> str:
    told = str(error)
    return told if told.startswith(node.name) else f"{node.kind} {node.name}: {told}"


def _hashed(stores: Stores, digest: str, form: str, name: str, unseen: list[str]) -> int:
    """Hash the bytes of a digest again and return their size; append unreachable external bytes to `unseen`."""
    if form != EXTERNAL or stores.blobs.has(digest):
        return verify_tree(stores.blobs, digest) if form == "tree" else stores.blobs.check(digest)
    for asset in external_versions(stores.ledger.assets_by_digest(digest), digest, name)[:1]:
        try:
            return check_where_it_lies(asset)
        except InfrastructureError as error:
            unseen.append(str(error))
        except NotFoundError as error:
            if not place_of(asset).of_this_machine:
                raise
            unseen.append(f"{error}; it may be on another machine")
    return 0
