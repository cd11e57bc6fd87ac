"""How often the items of a run's gates were evaluated before. `decision.gates` draws the consequence.

Items are told apart by their content. Two data sets that share half of the smaller one's items count as the same items,
so a row more or another order of rows begins no new count.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow.lib import ArrowException

from posttrain.control.deciding import EVIDENCE
from posttrain.control.stores import Stores
from posttrain.decision.gates import Look
from posttrain.domain.errors import IntegrityError, NotFoundError
from posttrain.domain.gates import GateRule
from posttrain.domain.kinds import METRICS, MODEL, kind_of
from posttrain.domain.manifest import SUITES, Manifest, StageManifest, measured_suites
from posttrain.domain.policies import LookBudget, PinnedPolicy, suite_of
from posttrain.domain.records import Look as Evaluation
from posttrain.domain.records import StageRecord
from posttrain.domain.rewards import JUDGES

Ids = NDArray[np.uint64]  # of items, sorted and distinct
_SHARED = 2  # one item in so many of the smaller set, in common: the items are the same


def evaluations(stores: Stores, items: str, written: Iterable[str] = ()) -> list[Evaluation]:
    """Every evaluation of these items, oldest first.

    An evaluation without readable results (it failed, or they were erased) counts where it read the same data set.

    Args:
        items: digest of a data set.
        written: ids of its items, for a data set that was never evaluated.
    """
    with stores.ledger.snapshot() as now:
        measured = now.measured(SUITES, METRICS)
    known: dict[str, Ids] = {}
    for one in measured:
        if one.items not in known:
            found = _measured_ids(stores.blobs.get, one.results, one.slot.removeprefix(SUITES))
            known |= {one.items: found} if found.size else {}
    mine = known.get(items)
    if mine is None:
        mine = _numbers(written)
    same = {digest for digest, theirs in known.items() if _alike(mine, theirs)} | {items}
    with stores.ledger.snapshot() as now:
        looks = {look for digest in same for look in now.looks(digest) if kind_of(look.kind).measures}
    return sorted(looks, key=lambda look: (look.at, look.run_id, look.stage))


def _alike(mine: Ids, theirs: Ids) -> bool:
    return 0 < min(mine.size, theirs.size) <= _SHARED * np.intersect1d(mine, theirs, assume_unique=True).size


@functools.lru_cache(256)
def _measured_ids(get: Callable[[str], bytes], results: str, suite: str) -> Ids:
    """The items of a suite in an evaluation's `metrics.parquet`; none where it was erased or cannot be read.

    A gate that judges an unreadable file ends as ERROR; a gate that only counts it goes on.
    """
    try:
        written = io.BytesIO(get(results))
    except (NotFoundError, IntegrityError):
        return _numbers(())
    try:
        table = pq.ParquetFile(written).read(["metric", "item_id"], use_threads=False)
        own = table.filter(pc.starts_with(table["metric"], f"{suite}/"))["item_id"]
        return _numbers(map(str, own.to_pylist()))
    except (ArrowException, KeyError, OSError):  # of the bytes: a store that does not answer is retried
        return _numbers(())


def _numbers(ids: Iterable[str]) -> Ids:
    """Eight bytes of each id's hash: a set of 100,000 items takes 0.8 MB."""
    found = {hashlib.blake2b(one.encode(), digest_size=8).digest() for one in ids}
    return np.sort(np.frombuffer(b"".join(found), dtype=np.uint64))


def gate_looks(
    stores: Stores,
    manifest: Manifest,
    pinned: PinnedPolicy | None,
    rows: Mapping[str, StageRecord],
    run_id: str | None = None,
    written: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> dict[str, Look]:
    """The look of every rule at its items; rules whose items are not known are left out.

    Evaluations of the same run that the gate compares with are part of its look, and not looks before it.

    Args:
        pinned: the policy that the run was planned under. Where it has no `looks`, a project with roles, as every
            server has them, corrects for the number of looks, and an embedded workspace warns.
        rows: stages of the run; before there is one, stages whose cached results it will reuse. An evaluation that is
            not there is the next look.
        run_id: the run; None: it is not submitted.
        written: by digest, ids of the items of data sets that were never evaluated.
    """
    gate = next((stage for stage in manifest.stages if kind_of(stage.kind).judges), None)
    if gate is None:
        return {}
    budget: LookBudget = "corrected" if stores.ledger.roles() else "warn"
    if pinned is not None and pinned.policy.looks is not None:
        budget = pinned.policy.looks
    named = {slot: ref.name for slot, ref in gate.inputs.items() if ref.source == "stage"}
    judged = [manifest.stage(name) for slot, name in named.items() if slot.startswith(EVIDENCE)]
    own = {(run_id, name) for slot, name in named.items() if not slot.startswith(EVIDENCE)}
    before = functools.cache(lambda items: evaluations(stores, items, written.get(items, ())))
    return {
        rule.name: Look(max(_place(before(items), stage, rows, own) for stage, items in found), budget)
        for rule in manifest.gates
        if (found := [(stage, items) for stage in judged for items in _items(stage, rule)])
    }


def _items(stage: StageManifest, rule: GateRule) -> Iterator[str]:
    """Digests of the data that a rule judges: its suite's, or of a kind without suites everything that it reads."""
    suites = {name: ref.digest for name, ref in measured_suites(stage)}
    if suites:
        wanted = suites.get(suite_of(rule.metric))
        yield from [wanted] if wanted else []
        return
    for slot, ref in stage.inputs.items():
        if slot != MODEL and not slot.startswith(JUDGES) and ref.digest:
            yield ref.digest


def _place(
    looks: Iterable[Evaluation],
    stage: StageManifest,
    rows: Mapping[str, StageRecord],
    own: Collection[tuple[str | None, str]],
) -> int:
    """The number of an evaluation among those of its items; the next number of one that is to come.

    Before it are those that began before it and those that ended before it did: what was judged first is counted,
    whichever began first. What the cache answers keeps its number.
    """
    row = rows.get(stage.name)
    mine = (row.cached_from or f"{row.run_id}/{row.name}") if row else ""
    others = {f"{look.run_id}/{look.stage}": look for look in looks if (look.run_id, look.stage) not in own}
    this = others.pop(mine, None)
    if this is None:
        return 1 + len(others)
    began, ended = (this.at, mine), this.ended or math.inf
    return 1 + sum((one.at, name) < began or (one.ended or math.inf) < ended for name, one in others.items())
