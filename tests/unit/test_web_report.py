"""The run report is well-formed, complete, self-contained and escapes what runs bring along."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from posttrain.control.comparison import Difference
from posttrain.control.scores import Answered, Before, Response, Score, Scores
from posttrain.decision.gates import Estimate, Paired
from posttrain.domain.errors import WorkspaceError
from posttrain.domain.gates import Outcome, Verdict
from posttrain.domain.jobs import Sample
from posttrain.web.pages import MOST_BYTES, duration, excerpt, number
from posttrain.web.panels import CurveSeries
from posttrain.web.report import (
    BudgetRow,
    RunReport,
    SampledStep,
    StageCurves,
    StageParameters,
    StageRow,
    StageSamples,
    SuiteAnswers,
    SystemRow,
    render_run_report,
    run_report,
    scale,
)

VOID = {"meta", "br", "img", "line", "circle", "path", "link", "input", "hr"}
FAILED = Verdict(
    gate="no-regression", metric="heldout/accuracy", outcome=Outcome.FAIL, reason="it is 0.3125, too little.",
    test="paired score limit (Tango)", confidence=0.95, items=1234, estimate=0.3125, baseline_estimate=0.9688,
    difference=-0.6563, limit=-0.7012, threshold=-0.02, missed_by=0.6812, details={"discordance": 0.6719},
)  # fmt: skip
PASSED = Verdict(
    gate="accuracy", metric="heldout/accuracy", outcome=Outcome.PASS, reason="it is 0.97.", test="Wilson score limit",
    confidence=0.975, items=512, estimate=0.97, limit=0.9512, threshold=0.9, missed_by=-0.0512,
)  # fmt: skip
BROKEN = Verdict(
    gate="shorter", metric="heldout/tokens", outcome=Outcome.ERROR, reason="it was not measured.", test="none",
    confidence=0.95, items=0, threshold=-0.5,
)  # fmt: skip
ESTIMATE = Estimate(0.3125, 0.29, 0.34, 1234, "exact limit")
PAIRED = Paired(9, 41, 1184, -0.026, -0.04, -0.012, "paired limit", 0.00001)
SCORES = Scores(
    (
        Score("evaluate", "heldout", "heldout/accuracy", "stage grpo", ESTIMATE, (
            Before("channel prod", "baseline-evaluate", Estimate(0.9688, 0.95, 0.98, 1234, "exact limit"), PAIRED),
            Before("base model:tiny@1", "base-eval", Estimate(0.1, 0.08, 0.12, 800, "exact"), None, "other items"),
        )),
        Score("evaluate", "hard", "hard/pass@4", "stage grpo", Estimate(0.5, None, None, 7, "no declared range"), ()),
    ),
    ("sft-eval: blob is gone",),
)  # fmt: skip


def sample(text: str) -> Sample:
    return Sample("0.7.1", 0, text, text, [1], [2, 3], [-0.1, -0.2], True, ["0.0"], 0.75, text, {"exact": 1.0}, "ok")


def answered(text: str, correct: bool) -> Response:
    return Response(Answered(0, "heldout", "i0", "greedy", 0, correct, True, 17), text, text, text, None)


def suite(text: str, shown: int = 1) -> SuiteAnswers:
    wrong, right = (answered(text, False),) * shown, (answered(text, True),) * shown
    return SuiteAnswers(text, text, text, 1234, 848, 5, wrong, right)


def curves(stage: str, metrics: int, points: int) -> StageCurves:
    values = [float(n % 7) for n in range(points)]
    names = ["reward/mean", "probe/accuracy", "loss", *(f"own/{n}" for n in range(metrics))][:metrics]
    return StageCurves(stage, "grpo", {n: CurveSeries(n, stage, range(points), values, metric=n) for n in names})


REPORT = RunReport(
    run_id="r-7f3a",
    name="sort",
    state="rejected",
    owner="somebody",
    seed=20261,
    manifest_digest="sha256:" + "a1" * 32,
    reason="gate no-regression fails.",
    next_action="posttrain why r-7f3a",
    stages=(
        StageRow("sft", "sft", "succeeded", "r-0001/sft", 0, None, 0, "sha256:" + "b2" * 32),
        StageRow("grpo", "grpo", "succeeded", None, 2, 83.4, 1234567, "sha256:" + "c3" * 32),
    ),
    gates=(FAILED, PASSED, BROKEN),
    lineage=("model sha256:c3", "├── reward:sort@2", "└── dataset:sort-train@1"),
    budgets=(BudgetRow("tokens", 1234567, 2000000), BudgetRow("seconds", 99, 60), BudgetRow("cost", 0.125)),
    warnings=("reward:sort@2 is not the version that prod was trained on",),
    compared_with="r-0001",
    changes=(Difference("stages.grpo.inputs.reward", "reward:sort@1", "reward:sort@2", ("guideline: a → b",)),),
    scores=SCORES,
    curves=(curves("grpo", 5, 40),),
    samples=(StageSamples("grpo", (SampledStep(12, 8, (sample("the response"),)),)),),
    answers=(suite("the answer"),),
    parameters=(StageParameters("grpo", "grpo", (("reward", "reward:sort@2", "sha256:d4"),), (("steps", "60"),)),),
    system=(SystemRow("grpo", 83.4, 1234567, 15123.4, 0.21, 60, (("rollout", 0.15, 0.7),)),),
)


class Page(HTMLParser):
    """Checks nesting, collects text and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def test_everything_given_appears() -> None:
    text = Page(render_run_report(REPORT)).text
    for piece in (
        "r-7f3a", "sort", "rejected", "somebody", "20261", "sha256:" + "a1" * 32, "gate no-regression fails.",
        "posttrain why r-7f3a", "cached from r-0001/sft", "sha256:" + "b2" * 32, "1 min 23 s", "1,234,567",
        "FAIL", "it is 0.3125, too little.", "0.9688", "-0.6563", "-0.7012", "-0.02", "0.6812", "1,234", "0.6719",
        "paired score limit (Tango)", "PASS", "0.97", "0.9512", "0.0512", "512", "0.975", "ERROR",
        "it was not measured.",
        "├── reward:sort@2", "└── dataset:sort-train@1", "2,000,000", "99", "60", "0.125",
        "reward:sort@2 is not the version", "What changed against r-0001", "stages.grpo.inputs.reward",
        "reward:sort@1", "guideline: a → b",
        "0.312", "[0.290, 0.340]", "before: channel prod", "-0.026", "[-0.040, -0.012]", "clear of 0", "9, 41, 1,184",
        "not paired: other items", "not measured", "sft-eval: blob is gone", "exact limit", "own/0", "probe/accuracy",
        "held-out accuracy (probe)", "least 0, greatest 6", "the response", "exact 1", "reward 0.75",
        "848 of 1,234 items are answered wrong", "nothing", "steps", "15,123", "rollout 150 ms 70 %",
    ):  # fmt: skip
        assert piece in text, piece


def test_the_page_needs_nothing_from_outside() -> None:
    html = render_run_report(REPORT)
    page = Page(html)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import|\bon[a-z]+=", html)
    assert not [value for name, value in page.attributes if name in ("src", "href", "data", "action")]
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html


def test_hostile_strings_are_text() -> None:
    evil = "</pre></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7*7 }}&amp;"
    verdict = FAILED.model_copy(
        update={"gate": evil, "metric": evil, "reason": evil, "test": evil, "details": {evil: 1.0}}
    )
    hostile = replace(
        REPORT, run_id=evil, name=evil, state=evil, owner=evil, manifest_digest=evil, reason=evil, next_action=evil,
        stages=(StageRow(evil, evil, evil, evil, 1, 1.0, 1, evil),), gates=(verdict,), lineage=(evil,),
        budgets=(BudgetRow(evil, 1, 2),), warnings=(evil,), compared_with=evil,
        changes=(Difference(evil, evil, evil, (evil,)),),
        scores=Scores((Score(evil, evil, evil, evil, ESTIMATE, (Before(evil, evil, ESTIMATE, None, evil),)),), (evil,)),
        curves=(StageCurves(evil, evil, {evil: CurveSeries(evil, evil, (0, 1), (0, 1), metric=evil)}, evil),),
        samples=(StageSamples(evil, (SampledStep(0, 1, (replace(sample(evil), id=evil, components={evil: 1.0}),)),)),),
        answers=(suite(evil),), parameters=(StageParameters(evil, evil, ((evil, evil, evil),), ((evil, evil),)),),
        system=(SystemRow(evil, 1, 1, 1, 1, 1, ((evil, 1, 1),)),),
    )  # fmt: skip
    page = Page(render_run_report(hostile))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.tags.count("style") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all("alert" not in value for name, value in page.attributes if name != "aria-label")
    assert "".join(page.texts).count(evil) > 50


def test_outcomes_are_coloured_and_named() -> None:
    html = render_run_report(REPORT)
    for kind, word in (("bad", "FAIL"), ("good", "PASS"), ("bad", "ERROR")):
        assert f'<span class="badge {kind}">{word}</span>' in html
    assert '<span class="badge bad">rejected</span>' in html


def test_empty_parts_are_left_out() -> None:
    page = Page(render_run_report(RunReport("r", "n", "pending", "o", 1, "sha256:x")))
    assert not {"table", "img", "pre", "h2", "svg", "details"} & set(page.tags)


def test_a_limit_of_zero_is_no_division() -> None:
    Page(render_run_report(replace(REPORT, budgets=(BudgetRow("tokens", 5, 0),))))


def test_the_scale_keeps_the_order_of_the_numbers() -> None:
    drawn = scale(FAILED)
    assert drawn is not None
    assert 0 < drawn.limit < drawn.value < drawn.threshold < 100
    assert scale(BROKEN) is None
    alike = scale(PASSED.model_copy(update={"estimate": 1.0, "limit": 1.0, "threshold": 1.0}))
    assert alike is not None
    assert alike.value == alike.limit == alike.threshold


def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.html", "two.html"):
        run_report(tmp_path / name, REPORT)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(WorkspaceError, match="cannot write"):
        run_report(tmp_path / "missing" / "one.html", REPORT)


@pytest.mark.slow
def test_a_page_stays_small_whatever_the_run(tmp_path: Path) -> None:
    text = "<&\"'😀" * 2_000  # every character of it grows when it is written
    huge = replace(
        REPORT,
        curves=tuple(curves(f"stage-{n}", 30, 600) for n in range(80)),
        samples=tuple(StageSamples(f"s{n}", (SampledStep(1, 8, (sample(text),) * 4),) * 5) for n in range(80)),
        answers=tuple(replace(suite(text, 24), stage="evaluate", suite=f"s{n}", of="grpo") for n in range(40)),
        lineage=(text,) * 5_000,
        changes=(Difference(text, text, text, (text,)),) * 2_000,
        stages=(StageRow("grpo", "grpo", "succeeded"),) * 3_000,
        scores=Scores(SCORES.rows * 500),
        parameters=tuple(StageParameters(f"s{n}", "grpo", (), ((f"p{n}", text),) * 300) for n in range(300)),
    )
    run_report(tmp_path / "report.html", huge)
    written = (tmp_path / "report.html").read_text()
    assert (tmp_path / "report.html").stat().st_size <= MOST_BYTES
    told = Page(written).text
    for words in (
        "more stages are left out",
        "more lines are left out",
        "more fields are left out",
        "more characters)",
    ):
        assert words in told
    assert "no-regression" in told, "what the run was judged by stays"


def test_a_small_page_shows_all_and_a_long_curve_its_extremes() -> None:
    values = [0.5] * 600
    values[177], values[401] = 9.0, -4.0
    drawn = StageCurves("grpo", "grpo", {"loss": CurveSeries("loss", "grpo", range(600), values, metric="loss")})
    html = render_run_report(replace(REPORT, curves=(drawn,)))
    assert "least -4, greatest 9" in Page(html).text
    assert "left out" not in Page(html).text
    path = re.search(r'class="ln raw s0" d="M([^"]*)"', html)
    assert path
    heights = [float(point.split()[1]) for point in path[1].split("L")]
    assert len(heights) < 250
    middle = heights[0]
    assert min(heights) < middle - 40
    assert max(heights) > middle + 20


def test_texts_are_cut_and_nothing_in_them_turns_the_writing() -> None:
    assert excerpt("abc", 3) == "abc"
    assert excerpt("abcdef", 3) == "abc … (3 more characters)"
    assert excerpt("\x1b[31m\u202eabc\ud800\n\t", 99) == "␛[31m\ufffdabc\ufffd\n\t"


def test_numbers_and_times_are_written_for_people() -> None:
    assert [number(value) for value in (None, 0, 1234567, -0.02, 0.123456, 1e20)] == [
        "–", "0", "1,234,567", "-0.02", "0.1235", "1e+20",
    ]  # fmt: skip
    assert [number(value, signed=True) for value in (0.5, -0.5, 3)] == ["+0.5", "-0.5", "+3"]
    assert [duration(seconds) for seconds in (None, 4.21, 200, 7500, 59.99)] == [
        "–", "4.2 s", "3 min 20 s", "2 h 05 min", "1 min 00 s",
    ]  # fmt: skip
