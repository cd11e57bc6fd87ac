"""The stages that need no process (gate and release), the explanation of a run's state, and counts of evaluations.

A gate stage judges the evidence; a release stage moves the channel.

The explanation of a run's state contains the reason, the value that missed its limit with the difference, and the next
action.

A count records how often the items of a run's gates were evaluated before; `decision.gates` uses the count. Items are
identified by their content. Two data sets count as the same items if they share half of the items of the smaller set,
so an additional row or another order of rows starts no new count.
"""

import functools
import hashlib
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow.lib import ArrowException

from posttrain.control import approvals
from posttrain.control.channels import check_manifest, policy_of, refuse_release
from posttrain.control.release_plan import BASELINE, EVIDENCE, RIVAL
from posttrain.decision.gates import Baseline, Evidence, Look, judge_all
from posttrain.decision.releases import judged_at, promotion
from posttrain.domain.canonical import canonical_json, derive_seed, digest_json
from posttrain.domain.errors import (
    ApprovalError,
    ChannelClosedError,
    ConflictError,
    InputError,
    IntegrityError,
    NotFoundError,
    PolicyError,
    QuarantinedError,
    RecalledError,
    StaleWriteError,
)
from posttrain.domain.gates import CHANNEL, GateReport, GateRule, Outcome
from posttrain.domain.jobs import InputBlob
from posttrain.domain.kinds import METRICS, MODEL, REPORT, ItemRange, kind_of
from posttrain.domain.lifecycle import AttemptState, Reason, StageState
from posttrain.domain.manifest import SUITES, Manifest, StageManifest, deciding, deciding_code, measured_suites
from posttrain.domain.policies import LookBudget, PinnedPolicy, suite_of
from posttrain.domain.ports import BlobStore, crashpoint
from posttrain.domain.records import AttemptRecord, Look as Evaluation, RunRecord, StageRecord
from posttrain.domain.rewards import JUDGES
from posttrain.store.ledger import Stores
from posttrain.store.trees import verify_tree

Ids = NDArray[np.uint64]  # hashes of item ids, sorted and distinct
_SHARED = 2  # sets that share 1/_SHARED of the smaller set count as the same items
_COLUMNS = ("metric", "item_id", "value", "binary", "low", "high")  # in metrics.parquet; the last three are the range
_REASONS = {
    Outcome.FAIL: Reason.GATE_FAILED,
    Outcome.INCONCLUSIVE: Reason.GATE_INCONCLUSIVE,
    Outcome.ERROR: Reason.GATE_ERROR,
}
_TURNED_AWAY: Mapping[type[ConflictError], tuple[Reason, str]] = {
    # reason and next action of a rejected release; only planning the run file again leads to another judgement
    QuarantinedError: (Reason.QUARANTINED, "posttrain promote {run} --lift-quarantine REASON"),
    RecalledError: (Reason.RECALLED, "posttrain lineage {run}"),
    PolicyError: (Reason.POLICY_NOT_MET, "posttrain run RUN.yaml"),
    ApprovalError: (Reason.APPROVAL_REJECTED, "posttrain why {run}"),
    ChannelClosedError: (Reason.CHANNEL_FROZEN, "posttrain channel unfreeze {channel}"),
    ConflictError: (Reason.CHANNEL_MOVED, "posttrain get {channel}"),
}


def evaluations(stores: Stores, items: str, written: Iterable[str] = ()) -> list[Evaluation]:
    """Return every evaluation of these items, oldest first.

    An evaluation that failed, or whose results were erased, counts if it read the same data set.

    Args:
        items: the digest of a data set.
        written: the ids of the items, for a data set without evaluations.
    """
    with stores.ledger.snapshot() as now:
        measured = now.measured(SUITES, METRICS)
    known: dict[str, Ids] = {}
    for one in measured:
        if one.items not in known:
            found = _measured_ids(stores.blobs.get, one.results, one.slot.removeprefix(SUITES))
            known |= {one.items: found} if found.size else {}
    mine = known[items] if items in known else _numbers(written)
    same = {digest for digest, theirs in known.items() if _alike(mine, theirs)} | {items}
    with stores.ledger.snapshot() as now:
        looks = {look for digest in same for look in now.looks(digest) if kind_of(look.kind).measures}
    return sorted(looks, key=lambda look: (look.at, look.run_id, look.stage))


def _alike(mine: Ids, theirs: Ids) -> bool:
    return 0 < min(mine.size, theirs.size) <= _SHARED * np.intersect1d(mine, theirs, assume_unique=True).size


@functools.lru_cache(256)
def _measured_ids(get: Callable[[str], bytes], results: str, suite: str) -> Ids:
    """Return the items of a suite in an evaluation's `metrics.parquet`; empty if the file was erased or is unreadable.

    A gate that judges an unreadable file ends as ERROR; a gate that only counts it continues.
    """
    import pyarrow.compute as pc  # takes 0.1 s, and most commands judge nothing

    try:
        written = io.BytesIO(get(results))
    except (NotFoundError, IntegrityError):
        return _numbers(())
    try:
        table = pq.ParquetFile(written).read(["metric", "item_id"], use_threads=False)
        return _numbers(map(str, table.filter(pc.starts_with(table["metric"], f"{suite}/"))["item_id"].to_pylist()))
    except (ArrowException, KeyError, OSError):  # bad bytes only: an unavailable store raises, and the call is retried
        return _numbers(())


def _numbers(ids: Iterable[str]) -> Ids:
    """Return eight bytes of each id's hash, sorted, so a set of 100,000 items takes 0.8 MB."""
    found = {hashlib.blake2b(one.encode(), digest_size=8).digest() for one in ids}
    return np.sort(np.frombuffer(b"".join(found), dtype=np.uint64))


def gate_looks(
    stores: Stores,
    manifest: Manifest,
    pinned: PinnedPolicy | None,
    rows: Mapping[str, StageRecord],
    run_id: str | None = None,
    written: Mapping[str, Iterable[str]] | None = None,
) -> dict[str, Look]:
    """Return, by rule, the look at the rule's items; rules with unknown items are omitted.

    Evaluations of the same run with which the gate compares are part of the same look, not earlier looks. A result from
    the cache keeps the number that it has in the run that computed it.

    Args:
        pinned: the policy under which the run was planned. If the policy has no `looks`, a project with roles (as on
            every server) corrects for the number of looks, and an embedded workspace warns.
        rows: stages of the run; before submission, the stages whose cached results the run will reuse. A missing
            evaluation is the next look.
        run_id: the run; None: the run is not submitted yet.
        written: digest → ids of the items, for data sets without evaluations.
    """
    gate = next((stage for stage in manifest.stages if kind_of(stage.kind).judges), None)
    if gate is None:
        return {}
    budget: LookBudget = "corrected" if stores.ledger.roles() else "warn"
    if pinned is not None and pinned.policy.looks is not None:
        budget = pinned.policy.looks
    named = {slot: ref.name for slot, ref in gate.inputs.items() if ref.source == "stage"}
    judged = [manifest.stage(name) for slot, name in named.items() if slot.startswith(EVIDENCE)]
    own = _baselines(stores, manifest, run_id, rows)
    for origin in {row.cached_from for stage in judged if (row := rows.get(stage.name)) and row.cached_from}:
        with suppress(NotFoundError, IntegrityError):  # of an unreadable run, every evaluation is an earlier look
            own |= _baselines_of(stores, origin.partition("/")[0])
    before = functools.cache(lambda items: evaluations(stores, items, (written or {}).get(items, ())))
    return {
        rule.name: Look(max(_place(before(items), stage, rows, own) for stage, items in found), budget)
        for rule in manifest.gates
        if (found := [(stage, items) for stage in judged for items in _items(stage, rule)])
    }


def _baselines(stores: Stores, manifest: Manifest, run_id: str | None, rows: Mapping[str, StageRecord]) -> set[str]:
    """Return each evaluation, as `RUN/STAGE`, with which the gate of a run compares.

    A result from the cache is one of them only if the run that computed it did not judge it.
    """
    found = set()
    for name in (name for name, judged in _gate_inputs(manifest) if not judged):
        found.add(f"{run_id}/{name}")
        if (row := rows.get(name)) and row.cached_from:
            run, _, stage = row.cached_from.partition("/")
            with suppress(NotFoundError, IntegrityError):
                inputs = _gate_inputs(stores.manifest(stores.ledger.run(run)))
                found |= {row.cached_from} if (stage, False) in inputs and (stage, True) not in inputs else set()
    return found


def _baselines_of(stores: Stores, run_id: str) -> set[str]:
    rows = {row.name: row for row in stores.ledger.stages(run_id)}
    return _baselines(stores, stores.manifest(stores.ledger.run(run_id)), run_id, rows)


def _gate_inputs(manifest: Manifest) -> set[tuple[str, bool]]:
    """Return the stages that a gate reads, each with whether the gate judges it; if not, it compares with it."""
    gates = [stage.inputs.items() for stage in manifest.stages if kind_of(stage.kind).judges]
    return {(ref.name, slot.startswith(EVIDENCE)) for slots in gates for slot, ref in slots if ref.source == "stage"}


def _items(stage: StageManifest, rule: GateRule) -> Iterator[str]:
    """Yield the digests of a rule's data: the data of its suite or, for a kind without suites, all data inputs."""
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
    own: Collection[str],
) -> int:
    """Return the number of an evaluation among all evaluations of its items; a future evaluation gets the next number.

    Evaluations that started or ended earlier have lower numbers, so earlier judgements always count. A result from the
    cache retains its number.
    """
    row = rows.get(stage.name)
    mine = (row.cached_from or f"{row.run_id}/{row.name}") if row else ""
    others = {name: look for look in looks if (name := f"{look.run_id}/{look.stage}") not in own}
    this = others.pop(mine, None)
    if this is None:
        return 1 + len(others)
    began, ended = (this.at, mine), this.ended or math.inf
    return 1 + sum((one.at, name) < began or (one.ended or math.inf) < ended for name, one in others.items())


def judge_stage(stores: Stores, manifest: Manifest, stage: StageRecord) -> None:
    """Judge every gate of the run on the bound evidence; the release stage starts only after PASS."""
    inputs = {slot: InputBlob(**blob) for slot, blob in stage.inputs.items()}
    evaluators = {s.name: _evaluator(manifest, s) for s in manifest.stages if s.measures}
    rivals = {CHANNEL, *(rule.rival for rule in manifest.gates if rule.rival)}
    release, policy = manifest.release, manifest.policy
    pinned = policy_of(stores, release.channel, policy) if release and policy else None
    rows = {row.name: row for row in stores.ledger.stages(stage.run_id)}
    report = judge_all(
        manifest.gates,
        _read(stores.blobs, inputs, EVIDENCE),
        {word: _baseline(stores.blobs, inputs, word) for word in rivals},
        candidate_digest=inputs["candidate"].digest,
        evaluator_digest=digest_json(evaluators),
        seed=derive_seed(manifest.seed, "gate"),
        looks=gate_looks(stores, manifest, pinned, rows, stage.run_id),
    )
    bound: dict[str, Any] = {"manifest": stores.ledger.run(stage.run_id).manifest_digest, "policy": manifest.policy}
    if release is not None:
        bound |= {"channel": release.channel, "release": _release_in(inputs.get(CHANNEL), release.channel)}
    report = report.model_copy(update=bound)
    written = canonical_json(report.model_dump(mode="json"))
    digest = stores.blobs.put(written)
    passed = report.outcome is Outcome.PASS
    crashpoint("gate.before_commit")
    stores.update_stage(
        stage,
        state=StageState.SUCCEEDED if passed else StageState.REJECTED,
        reason=Reason.GATE_PASSED if passed else _REASONS[report.outcome],
        message=summary(report),
        next_action="" if passed else f"posttrain why {stage.run_id}",
        outputs={"report": {"digest": digest, "form": "file"}},
        sizes={digest: len(written)},
        metrics={f"{v.gate}/estimate": v.estimate for v in report.verdicts if v.estimate is not None},
        finished_at=stores.clock.now(),
    )
    crashpoint("gate.after_commit")


def _release_in(live: InputBlob | None, channel: str) -> int | None:
    """Return the number of the release with which a gate compared (`channel:prod@3`); 0: no release; None: unknown."""
    if live is None:
        return 0
    named, _, sequence = live.name.rpartition("@")
    return int(sequence) if named == f"channel:{channel}" and sequence.isdecimal() else None


def _baseline(blobs: BlobStore, inputs: Mapping[str, InputBlob], word: str) -> Baseline:
    """Return the baseline of a rule: a model and its measurements."""
    model = inputs.get(CHANNEL if word == CHANNEL else RIVAL + word)
    return Baseline(
        model.digest if model else None, _read(blobs, inputs, BASELINE if word == CHANNEL else f"{RIVAL}{word}.")
    )


def _evaluator(manifest: Manifest, stage: StageManifest) -> dict[str, Any]:
    """Return the part of a report's evaluator digest for a stage: code, parameters, and the suites' data."""
    suites = {slot: [ref.digest, ref.meta] for slot, ref in stage.inputs.items() if slot != "model"}
    return {"code": deciding_code(manifest, stage), "params": deciding(stage.params), "suites": suites}


def summary(report: GateReport) -> str:
    """Return one line with the number of gates and the values of the first gate."""
    total = len(report.verdicts)
    if report.outcome is Outcome.PASS:
        return "the gate passes" if total == 1 else f"all {total} gates pass"
    if not report.decisive:
        return "no gate was judged, so nothing may be released"
    first, count = report.decisive[0], len(report.decisive)
    verb = {Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "inconclusive", Outcome.ERROR: "could not be judged"}
    return f"{count} of {total} gates {verb[report.outcome]}; {first.gate}: {first.reason.rstrip('.')}"


def release_stage(
    stores: Stores, run: RunRecord, manifest: Manifest, stage: StageRecord, stages: Mapping[str, StageRecord]
) -> None:
    """Move the channel to the judged model, if the channel has not moved since the gate ran.

    If the channel is protected or its policy names approvers, the stage waits for an approval before it hashes the
    model.
    """
    assert manifest.release is not None
    inputs = {slot: InputBlob(**blob) for slot, blob in stage.inputs.items()}
    report = read_report(stores.blobs, inputs["report"].digest)
    channel, candidate = manifest.release.channel, inputs["candidate"].digest
    try:
        live, judged = stores.ledger.channel(channel), judged_at(report, channel, stores.ledger.history(channel))
        move = promotion(live, judged, candidate, report)
        pinned = refuse_unmet(stores, run, manifest, report, channel) if move else None
        request = approvals.release_request(
            stores, run, channel, pinned, model=candidate, report=inputs["report"].digest, live=judged
        )
        if request and not approvals.await_release(stores, stage, request, pinned):
            return
        check_weights(stores.blobs, candidate, f"channel {channel} does not move")
        crashpoint("promote.before_commit")
        with stores.ledger.transaction(stores.actor) as transaction:
            if transaction.snapshot.run(run.id).desired == "stopped":
                return  # a person stopped the run before the channel moved: the next tick stops the stage
            if move:
                transaction.lock_recalls()
                refuse_release(transaction.snapshot, channel, candidate)
                live = transaction.append_release(
                    channel,
                    candidate,
                    run.id,
                    "promote",
                    judged,
                    inputs["report"].digest,
                    policy=report.policy,
                    approved=approvals.count(transaction, request, pinned),
                    requested_by=transaction.snapshot.known_submitter(run.id) or "",
                )
            verb = "now points" if move else "already pointed"
            transaction.update_stage(
                stage,
                state=StageState.SUCCEEDED,
                reason=Reason.PROMOTED if move else Reason.ALREADY_LIVE,
                message=f"{channel} {verb} at {candidate[:19]}… (release {live and live.sequence})",
                next_action="",  # cleared, since the old text may request approvals
                finished_at=stores.clock.now(),
            )
    except StaleWriteError:  # the stage's own row changed, not the channel: decide again
        raise
    except ConflictError as error:
        _turn_away(stores, stage, channel, error)
    crashpoint("promote.after_commit")


def _turn_away(stores: Stores, stage: StageRecord, channel: str, error: ConflictError) -> None:
    """Reject a release stage, with the reason of the error."""
    reason, action = next(told for kind, told in _TURNED_AWAY.items() if isinstance(error, kind))
    action = action.format(run=stage.run_id, channel=channel)
    stores.update_stage(stage, state=StageState.REJECTED, reason=reason, message=str(error), next_action=action)


def refuse_unmet(
    stores: Stores, run: RunRecord, manifest: Manifest, report: GateReport, channel: str
) -> PinnedPolicy | None:
    """Check a report against a channel's current policy, and return the policy.

    Raises:
        PolicyError: the report is for a different policy or manifest, or the run does not meet the policy.
    """
    if report.manifest not in (None, run.manifest_digest):
        raise PolicyError(
            f"run {run.id}: its gate report is for another manifest; judge again: posttrain run RUN.yaml --again"
        )
    pinned = policy_of(stores, channel)
    if pinned is None:
        return None
    if report.policy != pinned.digest:
        under = f"under {report.policy[:19]}…" if report.policy else "without a policy"
        raise PolicyError(
            f"channel {channel}: the policy is {pinned.digest[:19]}…, but the run was judged {under}; plan and "
            "judge it again: posttrain run RUN.yaml"
        )
    try:
        check_manifest(manifest, pinned)
    except InputError as error:
        raise PolicyError(f"run {run.id}: {error}") from error
    return pinned


def check_weights(blobs: BlobStore, digest: str, otherwise: str) -> None:
    """Hash a model before a channel may point at it.

    Args:
        otherwise: the start of the error message, about the channel.

    Raises:
        IntegrityError: bytes of the model are missing or corrupt.
    """
    try:
        verify_tree(blobs, digest)
    except (IntegrityError, NotFoundError) as error:
        raise IntegrityError(f"{otherwise}: model {digest[:19]}… cannot be released: {error}") from error


def read_report(blobs: BlobStore, digest: str) -> GateReport:
    """Return the gate report with a digest.

    Raises:
        IntegrityError: the bytes are corrupt.
        NotFoundError: there is no such blob.
    """
    return GateReport.model_validate(json.loads(blobs.get(digest)))


def _read(blobs: BlobStore, inputs: Mapping[str, InputBlob], prefix: str) -> dict[str, Evidence]:
    """Return per-item values by metric, from the evaluations' `metrics.parquet` with the columns `_COLUMNS`."""
    found: dict[str, Evidence] = {}
    for slot, blob in inputs.items():
        if slot.startswith(prefix):
            more = read_evidence(blobs.get(blob.digest), blob.name)
            twice = sorted(found.keys() & more.keys())
            if twice:
                raise IntegrityError(f"{blob.name}: {twice[0]} is also measured by another stage; rename a suite")
            found |= more
    return found


def read_evidence(data: bytes, source: str) -> dict[str, Evidence]:
    """Return the per-item evidence of every metric in one evaluation file.

    Raises:
        IntegrityError: the bytes are not an evaluation file.
    """
    try:
        # reads without threads, which may outlive the interpreter of a short command
        table = pq.ParquetFile(io.BytesIO(data)).read(list(_COLUMNS), use_threads=False)
        columns = [table.column(name).to_pylist() for name in _COLUMNS]
    except (OSError, ValueError, KeyError) as error:
        raise IntegrityError(f"{source}: evaluation results cannot be read: {error}; evaluate again") from error
    rows: dict[str, list[tuple[str, float]]] = {}
    ranges: dict[str, set[tuple[Any, ...]]] = {}
    for metric, item, value, *declared in zip(*columns, strict=True):
        rows.setdefault(metric, []).append((item, float("nan") if value is None else value))
        ranges.setdefault(metric, set()).add(tuple(declared))
    return {
        metric: Evidence(
            item_ids=tuple(item for item, _ in values),
            values=np.array([value for _, value in values], dtype=np.float64),
            range=_range(ranges[metric], f"{source}: {metric}"),
        )
        for metric, values in rows.items()
    }


def _range(declared: set[tuple[Any, ...]], what: str) -> ItemRange | None:
    """Return the range that all rows of a metric declare; None: they declare no range."""
    if len(declared) > 1:
        raise IntegrityError(
            f"{what} must declare the same range on all its items, got {len(declared)}; evaluate again"
        )
    binary, low, high = next(iter(declared))
    if low is None and high is None:
        return None
    try:
        return ItemRange(low, high, bool(binary))
    except (TypeError, ValueError) as error:
        raise IntegrityError(f"{what}: {error}; evaluate again") from error


@dataclass(frozen=True, slots=True)
class Explanation:
    """The output of `posttrain why`."""

    run: RunRecord
    stages: tuple[StageRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    report: GateReport | None

    @property
    def lost(self) -> tuple[AttemptRecord, ...]:
        """Attempts that failed, were lost or were stopped."""
        bad = (AttemptState.LOST, AttemptState.FAILED)
        return tuple(attempt for attempt in self.attempts if attempt.state in bad or attempt.stop_cause)


def explain_run(stores: Stores, run_id: str) -> Explanation:
    """Return the state of one run with its reasons."""
    run = stores.ledger.run(run_id)
    stages = tuple(stores.ledger.stages(run.id))
    gate = next((stage for stage in stages if kind_of(stage.kind).judges and REPORT in stage.outputs), None)
    report = read_report(stores.blobs, gate.outputs[REPORT]["digest"]) if gate else None
    return Explanation(run, stages, tuple(stores.ledger.attempts(run.id)), report)
