"""What evaluations leave, as the gate reads it; what a report, a release and a proof say of it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, Script, evaluate, train
from sqlalchemy import text

from posttrain.control import actions
from posttrain.control.lineage import release_lineage, run_lineage
from posttrain.control.verdicts import explain_run
from posttrain.control.verification import verify, verify_live
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import ConflictError, GateInconclusiveError, GateRejectedError, InputError, NotFoundError
from posttrain.domain.jobs import JobResult, Output
from posttrain.store.attempts import AttemptFolder
from posttrain.store.audit import verify_rows
from posttrain.store.journal import TABLES
from posttrain.store.schema import deployments, releases
from posttrain.store.sealer import seal
from posttrain.views.logs import moves

Range = tuple[bool, float | None, float | None]
METRIC = "heldout/accuracy"


def leaves(values: Sequence[float | None], ranges: Sequence[Range] = ((True, 0.0, 1.0),)) -> Script:
    """An evaluation that leaves these values, the last range for all items that name none."""
    declared = [*ranges, *[ranges[-1]] * len(values)][: len(values)]
    columns = {
        "metric": pa.array([METRIC] * len(values)),
        "item_id": pa.array([f"i{i}" for i in range(len(values))]),
        "value": pa.array(values, pa.float64()),
        "binary": pa.array([binary for binary, _, _ in declared]),
        "low": pa.array([low for _, low, _ in declared], pa.float64()),
        "high": pa.array([high for _, _, high in declared], pa.float64()),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return leaves_bytes(sink.getvalue())


def leaves_bytes(data: bytes) -> Script:
    def job(folder: AttemptFolder) -> int:
        folder.outputs.mkdir()
        for name, content in (("metrics", data), ("items", b"items")):
            (folder.outputs / f"{name}.parquet").write_bytes(content)
        outputs = {name: Output(f"outputs/{name}.parquet", "file") for name in ("metrics", "items")}
        folder.write_result(JobResult("succeeded", outputs, {}, 10))
        return 0

    return job


def mostly_right() -> list[float | None]:
    return [1.0] * 190 + [0.0] * 10


def judged(bench: Bench, job: Script, **changes: Any) -> Any:
    bench.scripts["evaluate"] = [job]
    return bench.drive(bench.submit(**changes))


def test_an_item_without_a_value_is_not_a_wrong_answer(bench: Bench) -> None:
    run = judged(bench, leaves([*mostly_right()[:-1], None]))
    assert (run.state, run.reason) == ("rejected", "GateError")
    assert "i199" in run.message


def test_items_that_declare_several_ranges_are_refused(bench: Bench) -> None:
    run = judged(bench, leaves(mostly_right(), [(True, 0.0, 1.0), (False, 0.0, 2.0)]))
    assert (run.state, run.reason) == ("failed", "Corrupt")
    assert f"{METRIC} must declare the same range on all its items, got 2" in run.message


def test_a_metric_without_a_range_cannot_be_judged(bench: Bench) -> None:
    run = judged(bench, leaves(mostly_right(), [(False, None, None)]))
    assert (run.state, run.reason) == ("rejected", "GateError")


def test_an_evaluation_that_cannot_be_read_fails_its_run_in_one_line(bench: Bench) -> None:
    run = judged(bench, leaves_bytes(b"no parquet"))
    assert (run.state, run.reason) == ("failed", "Corrupt")
    assert "evaluation results cannot be read" in run.message
    assert "\n" not in run.message


def test_too_few_items_are_no_verdict(bench: Bench) -> None:
    run = judged(bench, leaves([1.0] * 4 + [0.0]))
    assert (run.state, run.reason) == ("rejected", "GateInconclusive")
    assert isinstance(bench.error(run.id), GateInconclusiveError)
    assert bench.ledger.channel("prod") is None


def test_a_report_names_what_measured(bench: Bench) -> None:
    """Two reports may be compared when their evaluators are the same: code, parameters and data, but no seed."""

    def evaluator(**changes: Any) -> Any:
        report = explain_run(bench.stores, bench.drive(bench.submit(**changes)).id).report
        assert report is not None
        return report.evaluator

    suites = {"heldout": {"data": "heldout", "max_new_tokens": 77}}
    longer = {**RUN["stages"], "evaluate": {**RUN["stages"]["evaluate"], "suites": suites}}
    absolute = [RUN["gates"][0]]
    first = evaluator(gates=absolute)
    assert evaluator(gates=absolute, seed=2) == first
    assert evaluator(gates=absolute, stages=longer) != first
    watched = {**RUN["stages"], "evaluate": {**RUN["stages"]["evaluate"], "runtime": {"stall_after": "1h"}}}
    assert evaluator(gates=absolute, stages=watched) == first, "when a job is taken for hung decides no result"


def shipped_twice(bench: Bench) -> tuple[Any, Any]:
    first = bench.drive(bench.submit())
    bench.scripts |= {"sft": [train("better")], "evaluate": [evaluate(199)]}
    return first, bench.drive(bench.submit(seed=2))


def test_a_rollback_keeps_the_report_of_what_it_returns_to(bench: Bench) -> None:
    first, second = shipped_twice(bench)
    reports = [bench.stage(run.id, "gate").outputs["report"]["digest"] for run in (first, second)]
    assert actions.rollback(bench.stores, "prod").report_digest == reports[0]
    with pytest.raises(ConflictError, match="still point at release 1, with which the gates compared, got release 3"):
        actions.promote(bench.stores, second.id, "prod", "the traffic was at fault")
    third = bench.drive(bench.submit(seed=2, again=True))
    assert (third.state, third.reason) == ("rejected", "Quarantined")
    again = actions.promote(bench.stores, third.id, "prod", "the traffic was at fault")
    report = bench.stage(third.id, "gate").outputs["report"]["digest"]
    assert (again.sequence, again.run_id, again.report_digest) == (4, third.id, report)
    assert actions.promote(bench.stores, third.id, "prod") == again


def test_a_word_that_names_several_models_rolls_back_to_none(bench: Bench) -> None:
    shipped_twice(bench)
    with pytest.raises(InputError, match="'r-' names 2 models; name one by its release number"):
        actions.rollback(bench.stores, "prod", to="r-")
    assert len(bench.ledger.history("prod")) == 2


def test_a_promotion_needs_a_report_and_one_that_passed(bench: Bench) -> None:
    run = judged(bench, leaves([0.0] * 200))
    with pytest.raises(GateRejectedError):
        actions.promote(bench.stores, run.id, "prod")
    trained = bench.drive(bench.submit(**TRAIN_ONLY))
    with pytest.raises(InputError, match="promote needs a gate report"):
        actions.promote(bench.stores, trained.id, "prod")


def test_two_who_submit_at_once_share_a_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = bench.ledger.runs

    def nothing_yet(**asked: Any) -> Any:
        """The other one commits after this look and before this one's own commit."""
        looks.append(asked)
        return [] if len(looks) == 1 else looked(**asked)

    looks: list[Any] = []
    first = bench.submit(**TRAIN_ONLY)
    monkeypatch.setattr(bench.ledger, "runs", nothing_yet)
    assert bench.submit(**TRAIN_ONLY) == first
    monkeypatch.undo()
    assert [run.id for run in bench.ledger.runs()] == [first]


@pytest.mark.parametrize("what", ["model", "report", "chain"])
def test_a_proof_finds_what_was_altered(bench: Bench, what: str) -> None:
    bench.drive(bench.submit())
    seal(bench.ledger)
    tree = release_lineage(bench.stores, "prod")
    sound = verify(bench.stores, lambda: tree)  # the bench's datasets are digests without bytes
    assert (sound.events > 10, sound.pending) == (True, 0)
    with bench.ledger.database.write(across="a test") as connection:
        if what == "chain":
            connection.exec_driver_sql("UPDATE events SET kind = kind || 'x' WHERE id = 2")
    report = bench.stage(bench.ledger.runs()[0].id, "gate").outputs["report"]["digest"]
    spoilt = {"model": digest_bytes(b"weights"), "report": report}.get(what, "sha256:")
    for path in (bench.root / "blobs" / "sha256").rglob("*"):
        if path.is_file() and spoilt == "sha256:" + path.parent.name + path.name:
            path.write_bytes(path.read_bytes()[::-1])
    added = set(verify(bench.stores, lambda: tree).problems) - set(sound.problems)
    assert len(added) == 1, added
    with bench.ledger.database.write(across="a test") as connection:
        connection.exec_driver_sql("UPDATE events SET kind = rtrim(kind, 'x') WHERE id = 2")


# --- the ledger behind its log ----------------------------------------------------------------------------------------


def test_audit_13_an_edited_release_row_is_found_whichever_way_verify_is_asked(bench: Bench) -> None:
    run_id = bench.drive(bench.submit()).id
    seal(bench.ledger)
    columns = {column.name: column for column in TABLES["releases"].table.columns if column.name != "project"}
    for name in columns:
        with bench.ledger.database.write(across="a test") as connection:
            value = "50" if name in ("sequence", "at") else "'x'"
            (kept,) = connection.exec_driver_sql(f"SELECT {name} FROM releases").one()
            connection.exec_driver_sql(f"UPDATE releases SET {name} = {value}")
        for found in (
            verify(bench.stores, lambda: release_lineage(bench.stores, "prod")),
            verify(bench.stores, lambda: run_lineage(bench.stores, run_id)),
            verify_live(bench.stores),
        ):
            assert any(problem.startswith("release ") for problem in found.problems), name
        with bench.ledger.database.write(across="a test") as connection:
            connection.execute(text(f"UPDATE releases SET {name} = :kept"), {"kept": kept})
    with pytest.raises(NotFoundError):
        verify(bench.stores, lambda: release_lineage(bench.stores, "unheard-of"))


def test_audit_13_an_edited_cache_row_answers_nothing(bench: Bench) -> None:
    first = bench.drive(bench.submit())
    bench.scripts["sft"] = [train("the weights of somebody else")]
    other = bench.drive(bench.submit(seed=2))
    bench.launched.clear()
    with bench.ledger.database.write(across="a test") as connection:
        moved = text("UPDATE stage_cache SET run_id = :other WHERE stage = 'sft' AND run_id = :first")
        assert connection.execute(moved, {"other": other.id, "first": first.id}).rowcount == 1
        keyed = text("UPDATE stages SET cache_key = :key WHERE name = 'sft' AND run_id = :other")
        connection.execute(keyed, {"key": bench.stage(first.id, "sft").cache_key, "other": other.id})
    bench.scripts["sft"] = [train()]
    again = bench.drive(bench.submit(again=True))
    assert bench.launched[0] == "sft", "the edited row is no answer"
    assert "evaluate" not in bench.launched, "what follows finds its own"
    assert bench.stage(again.id, "sft").outputs == bench.stage(first.id, "sft").outputs
    with bench.ledger.database.write(across="a test") as connection:
        # the outputs of the stage that answers are compared with the log, too
        connection.exec_driver_sql(
            "UPDATE stages SET outputs = replace(outputs, 'sha256:', 'sha256:0') WHERE name = 'sft'"
        )
    assert bench.ledger.cached_stage(bench.stage(again.id, "sft").cache_key) is None


def test_audit_13_a_release_that_is_not_live_breaks_neither_promotion_nor_rollback(bench: Bench) -> None:
    first = bench.drive(bench.submit())
    live = bench.ledger.channel("prod")
    assert live is not None
    with bench.ledger.transaction("test") as transaction:  # as a canary will be written
        columns = {"channel": "prod", "sequence": 2, "model_digest": f"sha256:{'c' * 64}", "run_id": None}
        columns |= {"action": "canary", "at": 1.0, "report_digest": None}
        columns |= {"project": "default", "principal": transaction._journal.principal("test")}
        transaction._insert(releases, columns, "release 2", "channel.canary", "prod")
        served = {"project": "default", "channel": "prod", "role": "canary", "release_sequence": 2, "weight": 0.1}
        transaction._insert(deployments, {**served, "generation": 1}, "canary", "channel.canary", "prod")
    assert bench.ledger.channel("prod") == live
    bench.scripts |= {"sft": [train("better")], "evaluate": [evaluate(199)]}
    second = bench.drive(bench.submit(seed=2))
    assert [(one.sequence, one.action) for one in bench.ledger.history("prod")] == [
        (1, "promote"),
        (2, "canary"),
        (3, "promote"),
    ]
    assert actions.rollback(bench.stores, "prod").run_id == first.id
    assert actions.rollback(bench.stores, "prod", to="3", lift_quarantine="a slip").run_id == second.id
    assert [move.entry.sequence for move in moves(bench.ledger, "prod")] == [5, 4, 3, 1]
    verify_rows(bench.ledger)
