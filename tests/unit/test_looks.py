"""Every evaluation of the same items is a look, and a gate holds its level over all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from control_bench import RUN, TRAIN_ONLY, Bench, Script, evaluate, train
from scipy import stats

from posttrain.control import channels
from posttrain.control.reconciler import Reconciler
from posttrain.control.verdicts import evaluations, read_report
from posttrain.data.rows import prompt_text
from posttrain.decision.gates import Evidence, Look, judge_all
from posttrain.domain.canonical import digest_bytes, digest_json
from posttrain.domain.gates import GateReport, GateRule, Outcome
from posttrain.domain.ids import Role
from posttrain.domain.kinds import RATE
from posttrain.domain.policies import ChannelPolicy, LookBudget, parse_policy
from posttrain.engine.config import InitModelConfig, SuiteConfig
from posttrain.engine.evaluation.evaluate import suite_items
from posttrain.engine.models.files import character_tokenizer
from posttrain.preflight.data import Dataset
from posttrain.store.attempts import AttemptFolder

HELDOUT = "dataset:heldout"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    scripts: dict[str, Any] = {"sft": [train()], "evaluate": [evaluate(190)], "baseline-evaluate": [evaluate(190)]}
    return Bench(tmp_path, scripts)


def chance(rule: GateRule, items: int, rate: float, look: Look) -> float:
    """The exact chance that this look passes a model whose true rate lies on the threshold."""
    ids = tuple(map(str, range(items)))

    def passes(right: int) -> bool:
        found = Evidence(ids, np.repeat([1.0, 0.0], [right, items - right]), RATE)
        report = judge_all(
            [rule], {"m": found}, {}, candidate_digest="c", evaluator_digest=None, seed=1, looks={"g": look}
        )
        return report.outcome is Outcome.PASS

    low, high = -1, items  # so many right items do not pass, and do
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return float(stats.binom.sf(high - 1, items, rate))


@pytest.mark.parametrize(("tries", "before"), [(10, 0.356), (20, 0.585)])
def test_audit_11_many_tries_on_the_same_items_pass_no_more_often_than_one(tries: int, before: float) -> None:
    rule = GateRule(name="g", metric="m", at_least=0.8)

    def any_passes(chosen: LookBudget) -> float:
        each = [chance(rule, 200, 0.8, Look(number, chosen)) for number in range(1, tries + 1)]
        return 1 - float(np.prod([1 - one for one in each]))

    assert any_passes("warn") == pytest.approx(before, abs=0.001)
    assert any_passes("corrected") <= 0.05
    assert any_passes(20) <= 0.05


def drive(bench: Bench, run_id: str) -> Any:
    bench.clock.sleep(60)  # no two evaluations begin at the same moment
    return bench.drive(run_id)


def run(bench: Bench, **changes: Any) -> Any:
    return drive(bench, bench.submit(**changes))


def reported(bench: Bench, run_id: str) -> GateReport:
    return read_report(bench.stores.blobs, bench.stage(run_id, "gate").outputs["report"]["digest"])


def measured_with(tokens: int) -> dict[str, Any]:
    """The stages of a run whose evaluator has this setting."""
    suites = {"heldout": {"data": "heldout", "max_new_tokens": tokens}}
    return {**RUN["stages"], "evaluate": {**RUN["stages"]["evaluate"], "suites": suites}}


def looks_of(bench: Bench, run_id: str) -> list[int | None]:
    return [verdict.look for verdict in reported(bench, run_id).verdicts]


def test_audit_11_other_settings_and_evaluations_without_a_release_are_looks_too(bench: Bench) -> None:
    first = run(bench, stages=measured_with(33)).id
    assert looks_of(bench, first) == [1, 1]
    run(bench, stages=measured_with(34), gates=[], release=None)
    second = run(bench, stages=measured_with(35)).id
    assert looks_of(bench, second) == [3, 3]
    third = run(bench, stages=measured_with(36)).id
    assert looks_of(bench, third) == [4, 4]
    again = run(bench, again=True, stages=measured_with(36)).id
    assert looks_of(bench, again) == [4, 4], "what the cache answers is no look"
    bench.scripts["sft"] = [train("other weights")]
    other = run(bench, seed=2, stages=measured_with(37)).id
    assert bench.stage(other, "baseline-evaluate").cached_from is None
    assert looks_of(bench, other) == [5, 5], "the comparison with the live model is a part of the same look"
    last = run(bench, seed=2, stages=measured_with(38)).id
    assert looks_of(bench, last) == [7, 7], "it showed the items once more all the same"
    (verdict, _) = reported(bench, third).verdicts
    assert verdict.confidence == 0.95
    assert verdict.reason.endswith("(look 4 at these items, judged as if it were the first).")
    run(bench, **TRAIN_ONLY)
    with bench.ledger.snapshot() as now:
        ids = {look.run_id for look in now.looks(bench.stage(third, "evaluate").inputs["suites.heldout"]["digest"])}
        assert third in ids
        assert again not in ids


def evaluate_items(ids: Sequence[str]) -> Script:
    """An evaluation of these items, all of which are right."""

    def job(folder: AttemptFolder) -> int:
        evaluate(len(ids), len(ids))(folder)
        path = folder.outputs / "metrics.parquet"
        pq.write_table(pq.read_table(path).set_column(1, "item_id", pa.array(ids)), path)
        return 0

    return job


def test_audit_11_a_row_more_or_another_order_begins_no_new_count(bench: Bench) -> None:
    def look_at(version: str, ids: Sequence[str]) -> int | None:
        bench.scripts["evaluate"] = [evaluate_items(ids)]
        found = run(bench, data={**RUN["data"], "heldout": f"dataset:{version}"}, gates=[RUN["gates"][0]])
        return looks_of(bench, found.id)[0]

    ids = [f"i{number}" for number in range(200)]
    assert look_at("heldout", ids) == 1
    assert look_at("a-row-more", [*ids, "new"]) == 2
    assert look_at("reversed", ids[::-1]) == 3
    assert look_at("half", ids[:100]) == 4, "all of its items were looked at"
    assert look_at("half-new", [*ids[:100], *(f"n{number}" for number in range(100))]) == 5
    assert look_at("mostly-new", [*ids[101:], *(f"m{number}" for number in range(101))]) == 1
    with bench.ledger.transaction("test") as transaction:
        transaction.set_role("user:ann", Role.ADMIN)
    assert look_at("reversed-again", ids[:150][::-1]) == 6, "mostly-new shares 49 of 150"


def test_audit_11_evaluations_side_by_side_share_no_number(bench: Bench) -> None:
    """Each has a file of its own with the same items, and the last to begin ends first."""
    bench.scripts |= {"evaluate": [None]}
    bench.jobs = replace(bench.jobs, slots=20)
    bench.reconciler = Reconciler(bench.stores, bench.jobs, "here")
    begun = []
    for number in range(3):
        bench.clock.sleep(60)
        data = {**RUN["data"], "heldout": f"dataset:d{number}"}
        begun.append(bench.submit(data=data, gates=[RUN["gates"][0]], seed=number + 1))
        for _ in range(6):
            bench.reconciler.tick(begun[-1])
    found = []
    for run_id in reversed(begun):
        (attempt,) = bench.ledger.attempts(run_id, "evaluate")
        evaluate_items([f"i{number}" for number in range(200)])(bench.jobs.folders.of(attempt))
        bench.executor.finish(str(attempt.handle), 0)
        drive(bench, run_id)
        found += looks_of(bench, run_id)
    assert found == [1, 2, 3]


def test_audit_11_an_unreadable_result_hides_no_other_and_stops_no_gate(bench: Bench) -> None:
    texts = (f"no table {number}".encode() for number in itertools.count())
    first = next(text for text in texts if digest_bytes(text).startswith("sha256:00"))  # before those of tables

    def unreadable(folder: AttemptFolder) -> int:
        evaluate(200)(folder)
        (folder.outputs / "metrics.parquet").write_bytes(first)
        return 0

    ids = [f"i{number}" for number in range(200)]
    bench.scripts["evaluate"] = [unreadable, evaluate_items(ids)]
    run(bench, gates=[], release=None)
    run(bench, stages=measured_with(34), gates=[], release=None)
    other = {"data": {**RUN["data"], "heldout": "dataset:other"}, "gates": [RUN["gates"][0]]}
    assert looks_of(bench, run(bench, **other).id) == [3], "both read the file that holds these items"


def test_audit_11_the_items_of_a_suite_are_its_own(bench: Bench) -> None:
    """An evaluation of two suites leaves one file for both."""

    def job(folder: AttemptFolder) -> int:
        evaluate(200)(folder)
        table = pq.read_table(folder.outputs / "metrics.parquet")
        other = table.set_column(0, "metric", pa.array(["other/accuracy"] * 200))
        both = pa.concat_tables([table, other.set_column(1, "item_id", pa.array([f"o{n}" for n in range(200)]))])
        pq.write_table(both, folder.outputs / "metrics.parquet")
        return 0

    bench.scripts["evaluate"] = [job]
    suites = {"heldout": {"data": "heldout"}, "other": {"data": "more"}}
    data = {**RUN["data"], "more": "dataset:more"}
    run(bench, data=data, stages={**RUN["stages"], "evaluate": {**RUN["stages"]["evaluate"], "suites": suites}},
        gates=[RUN["gates"][0]])  # fmt: skip
    assert len(evaluations(bench.stores, "sha256:new", [f"i{number}" for number in range(120)])) == 1
    assert evaluations(bench.stores, digest_json("dataset:more"), ()) != []
    bench.scripts["evaluate"] = [evaluate_items([f"o{number}" for number in range(90)])]
    found = run(bench, data={**RUN["data"], "heldout": "dataset:o"}, gates=[RUN["gates"][0]])
    assert looks_of(bench, found.id) == [2], "these are all in the other suite"
    bench.scripts["evaluate"] = [
        evaluate_items([*(f"o{n}" for n in range(60)), *(f"i{n}" for n in range(60)), "a", "b"])
    ]
    found = run(bench, data={**RUN["data"], "heldout": "dataset:mixed"}, gates=[RUN["gates"][0]])
    assert looks_of(bench, found.id) == [2], "less than half of them was in any suite but the one of 90"


def test_audit_11_a_plan_counts_looks_at_the_rows_that_its_evaluation_will_name(bench: Bench) -> None:
    rows = [{"prompt": f"q {number}", "answer": str(number)} for number in range(40)]
    tokenizer = character_tokenizer(InitModelConfig().characters)
    texts = [prompt_text(row) for row in rows]
    measured = suite_items(rows, texts, tokenizer, SuiteConfig(data="d"), name="d", context=512)
    bench.scripts["evaluate"] = [evaluate_items([item.id for item in measured])]
    run(bench, gates=[RUN["gates"][0]])
    assert list(Dataset(40, tuple(rows)).ids) == [item.id for item in measured]
    ids = list(Dataset(41, ({"prompt": "q new", "answer": "1"}, *rows)).ids)
    assert len(evaluations(bench.stores, "sha256:never-evaluated", ids)) == 1
    assert evaluations(bench.stores, "sha256:never-evaluated", ids[:1]) == []
    assert evaluations(bench.stores, "sha256:never-evaluated") == []


def test_audit_11_a_project_with_roles_judges_each_look_at_its_share(bench: Bench) -> None:
    with bench.ledger.transaction("test") as transaction:
        transaction.set_role("user:ann", Role.ADMIN)
    bench.scripts["evaluate"] = [evaluate(173), evaluate(173)]
    alone = [{"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.8}]
    first = run(bench, stages=measured_with(33), gates=alone).id
    (verdict,) = reported(bench, first).verdicts
    assert (verdict.look, verdict.asked, verdict.outcome) == (1, 0.95, Outcome.PASS)
    assert verdict.confidence == pytest.approx(1 - 0.05 / 2)
    second = run(bench, stages=measured_with(34), gates=alone).id
    (verdict,) = reported(bench, second).verdicts
    assert verdict.confidence == pytest.approx(1 - 0.05 / 6)
    assert verdict.outcome is Outcome.INCONCLUSIVE, "173 of 200 pass at .05, and not at a sixth of it"
    assert "(look 2 at these items)." in verdict.reason


def test_audit_11_a_policy_shares_its_error_rate_between_the_looks_that_it_declares(bench: Bench) -> None:
    def set_looks(looks: LookBudget) -> ChannelPolicy:
        digest = bench.stores.blobs.put(b"rows")
        suites = {"heldout": {"data": "dataset:heldout@1", "digest": digest, "evaluators": "any"}}
        gates = [{"name": "floor", "metric": "heldout/accuracy", "at_least": 0.6}]
        policy = parse_policy({"gates": gates, "suites": suites, "looks": looks}, "policy")
        channels.set_policy(bench.stores, "prod", policy)
        return policy

    from test_approvals import submitted

    set_looks(2)
    found = [reported(bench, drive(bench, submitted(bench)).id).verdicts[0]]
    assert (found[0].look, found[0].confidence) == (1, pytest.approx(1 - 0.05 / 2))
    set_looks(1)
    run(bench, stages=measured_with(34), gates=[], release=None)
    report = reported(bench, drive(bench, submitted(bench)).id)
    assert (report.verdicts[0].look, report.outcome) == (1, Outcome.PASS), "the cached evaluation is the first look"


def test_audit_11_the_look_after_the_last_that_a_policy_allows_is_not_judged() -> None:
    rule = GateRule(name="g", metric="m", at_least=0.1)
    found = Evidence(tuple(map(str, range(200))), np.ones(200), RATE)
    for number, outcome in ((2, Outcome.PASS), (3, Outcome.ERROR)):
        report = judge_all(
            [rule], {"m": found}, {}, candidate_digest="c", evaluator_digest=None, seed=1, looks={"g": Look(number, 2)}
        )
        assert report.outcome is outcome
    assert "look 3 at these items, of 2 that the channel's policy allows" in report.verdicts[0].reason


def test_a_result_from_the_cache_keeps_the_number_of_its_look(bench: Bench) -> None:
    """A baseline that an earlier run only compared with is no look, and one that it judged is a look."""
    gates = [{"name": "base", "metric": "heldout/accuracy", "not_worse_than": "base", "margin": 0.05}]
    bench.scripts["baseline-base.evaluate"] = [evaluate(190)]

    def trained(weights: str, steps: int, **changes: Any) -> tuple[str, list[int | None], str | None]:
        bench.scripts["sft"] = [train(weights)]
        stages = {**RUN["stages"], "sft": {**RUN["stages"]["sft"], "steps": steps}}
        found = run(bench, stages=stages, **changes).id
        names = [row.name for row in bench.ledger.stages(found) if row.name.startswith("baseline")]
        return found, looks_of(bench, found), bench.stage(found, names[0]).cached_from if names else None

    first, looks, _ = trained("first", 5, gates=gates)
    assert looks == [1]
    assert trained("first", 5, gates=gates, again=True)[1] == [1]
    _, looks, baseline = trained("second", 6, gates=gates)
    assert (looks, str(baseline).partition("/")[0]) == ([2], first)
    _, looks, baseline = trained("third", 7)
    assert (looks, str(baseline).partition("/")[2]) == ([4, 4], "evaluate"), "a run judged the model of the channel"


def test_a_run_again_that_compares_with_its_own_model_is_no_other_look(bench: Bench) -> None:
    """The first one measured the live model, which the second one does not compare with: its own is live by now."""
    run(bench)
    bench.scripts["sft"] = [train("other weights")]
    other, again = (run(bench, seed=2, again=again).id for again in (False, True))
    assert bench.stage(other, "baseline-evaluate").cached_from is None
    assert bench.stage(again, "baseline-evaluate").cached_from == f"{other}/evaluate"
    assert looks_of(bench, other) == looks_of(bench, again) == [2, 2]
