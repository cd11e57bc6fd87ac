"""`entry:` and `dialect:` of a reward in run.yaml: what is planned with, what is refused before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cli_world import believe_rewards
from test_preflight_fitting import Bench, Change

from posttrain import submit
from posttrain.app.runs import plan, view_plan
from posttrain.control.comparison import compare
from posttrain.control.lineage import Origins, _input_node
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import InputBlob
from posttrain.domain.manifest import InputRef
from posttrain.domain.records import Edge, StageRecord

TWO = (
    '"""Two of them."""\n\n\ndef right(completion, answer):\n    return float(completion == answer)\n\n\n'
    "def brief(solution_str, ground_truth):\n    return 1.0 / (1 + len(solution_str))\n"
)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    believe_rewards(monkeypatch)
    made = Bench(tmp_path)
    yield made
    made.workspace.close()


def uses(**exact: Any) -> Change:
    return lambda raw: raw["rewards"].update(exact=exact)


def planned(at: Bench, change: Change) -> InputRef:
    return plan(at.file(change), at.workspace).manifest.stage("grpo").inputs["reward"]


@pytest.fixture(params=["path", "registered"])
def ref(request: pytest.FixtureRequest, bench: Bench) -> str:
    """A file of two functions, by its path and from the registry."""
    (bench.folder / "reward.py").write_text(TWO)
    if request.param == "path":
        return "reward.py"
    bench.workspace.catalog.add_reward(bench.folder / "reward.py", "two", entry="right")
    return "reward:two"


def test_two_rewards_of_one_file(bench: Bench, ref: str) -> None:
    right, brief = planned(bench, uses(ref=ref, entry="right")), planned(bench, uses(ref=ref, entry="brief"))
    assert right.digest == brief.digest
    assert right.meta == {"entry": "right", "dialect": "auto", "source": "reward.py"}
    assert brief.meta == {"entry": "brief", "dialect": "auto", "source": "reward.py"}
    digests = {plan(bench.file(uses(ref=ref, entry=e)), bench.workspace).manifest.digest for e in ("right", "brief")}
    assert len(digests) == 2, "the function decides results"


def test_the_dialect_is_part_of_the_manifest(bench: Bench, ref: str) -> None:
    said = planned(bench, uses(ref=ref, entry="brief", dialect="verl"))
    assert said.meta["dialect"] == "verl"
    assert planned(bench, uses(ref=ref, entry="brief", dialect="auto")).meta["dialect"] == "auto"


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"entry": "rigth"}, "reward.py has no function 'rigth' (did you mean 'right'?); it defines right, brief"),
        ({"entry": "nothing_like_it"}, "reward.py has no function 'nothing_like_it'; it defines right, brief"),
        ({"entry": "other.py:right"}, "is one file, so entry must be a function's name, got 'other.py:right'"),
        (
            {"entry": "right", "dialect": "verl"},
            "reward.py:4 (right) (dialect verl): parameter 'completion' is neither a column of the data set nor part",
        ),
        ({"entry": "right", "dialect": "verl"}, "reward.py also defines brief"),
        ({"entry": "brief", "dialect": "row"}, "reward.py (brief): parameter 'solution_str' is neither a column of"),
    ],
)
def test_what_cannot_be_called_is_refused(
    bench: Bench,
    ref: str,
    said: dict[str, str],
    match: str,
) -> None:
    refused = bench.refused(uses(ref=ref, **said))
    assert refused.startswith("rewards.exact: ")
    assert match in refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"dialect": "ver"}, "rewards.exact.dialect: must be one of auto, trl, openrlhf, verl_batch, row, areal"),
        ({"dialect": "x" * 5000}, f"got {'x' * 60!r}"),
        ({"entry": "a b"}, "rewards.exact.entry: "),
        ({"entry": "f" * 300}, "rewards.exact.entry: "),
        ({"entry": ""}, "rewards.exact.entry: "),
        ({"entry": 3}, "rewards.exact.entry: must be text"),
        ({"entrance": "right"}, "rewards.exact.entrance: unknown key (did you mean 'entry'?)"),
    ],
)
def test_words_that_are_none_are_refused(bench: Bench, said: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(bench.file(uses(ref="reward.py", **said)), bench.workspace)
    assert match in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_of_several_says_how_to_name_one(bench: Bench) -> None:
    (bench.folder / "reward.py").write_text(TWO)
    refused = bench.refused(uses(ref="reward.py"))
    assert refused.endswith("it defines right, brief; name the function with --entry right, or in run.yaml with entry:")


def test_the_run_file_counts_before_the_registration_and_says_so(bench: Bench) -> None:
    (bench.folder / "reward.py").write_text(TWO)
    bench.workspace.catalog.add_reward(bench.folder / "reward.py", "two", entry="brief", dialect="verl")
    told = plan(bench.file(uses(ref="reward:two", entry="right")), bench.workspace)
    assert told.manifest.stage("grpo").inputs["reward"].meta["dialect"] == "auto", "verl was said of another function"
    assert told.warnings == (
        "rewards.exact: reward:two@1 is registered with entry brief, dialect verl; this run calls right, dialect auto",
    )
    same = plan(bench.file(uses(ref="reward:two", entry="brief")), bench.workspace)
    assert same.manifest.digest == plan(bench.file(uses(ref="reward:two")), bench.workspace).manifest.digest
    assert same.warnings == ()


def test_files_of_a_folder(bench: Bench) -> None:
    folder = bench.folder / "both"
    folder.mkdir()
    (folder / "reward.py").write_text("def score(completion):\n    return 1.0\n")
    (folder / "other.py").write_text(TWO)
    bench.workspace.catalog.add_reward(folder, "both")
    for ref in ("./both", "reward:both"):
        assert planned(bench, uses(ref=ref)).meta["entry"] == "reward.py:score"
        assert planned(bench, uses(ref=ref, entry="other.py:brief")).meta == {
            "entry": "other.py:brief", "dialect": "auto", "source": "other.py",
        }  # fmt: skip
        assert "reward.py has no function 'brief'" in bench.refused(uses(ref=ref, entry="brief"))
        assert "must contain 'gone.py', got other.py, reward.py" in bench.refused(uses(ref=ref, entry="gone.py:score"))


def test_a_function_of_a_package_is_named_by_its_ref(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bench.folder / "site"
    (site / "rated_pairs-1.dist-info").mkdir(parents=True)
    (site / "rated_pairs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: rated-pairs\nVersion: 1\n")
    (site / "rated_pairs-1.dist-info" / "top_level.txt").write_text("rated_pairs\n")
    (site / "rated_pairs.py").write_text("def exact(completion, completions): ...\ndef odd(solution_str): ...\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr("posttrain.preflight.confinement.check_imports", lambda *_: None)  # a job would not find it
    said = planned(bench, uses(ref="rated_pairs:exact", dialect="areal"))
    assert said.meta["dialect"] == "areal"
    assert "entry must not be set with rated_pairs:exact" in bench.refused(uses(ref="rated_pairs:exact", entry="odd"))
    assert "(dialect slime)" in bench.refused(uses(ref="rated_pairs:exact", dialect="slime"))


@pytest.mark.slow
def test_nothing_of_it_is_executed_outside_of_its_cell(tmp_path: Path) -> None:
    bench = Bench(tmp_path)  # whose plans import rewards for real
    leak = bench.folder / "leak"
    mark = f"\ntry:\n    open({str(leak)!r}, 'w')\nexcept OSError:\n    pass\n"
    (bench.folder / "reward.py").write_text(TWO + mark)
    submitted = submit(bench.file(uses(ref="reward.py", entry="brief")), workspace=bench.workspace)
    stored = submitted.manifest.stage("grpo").inputs["reward"]
    assert not leak.exists()
    assert bench.workspace.blobs.get(str(stored.digest)) == Path(bench.folder / "reward.py").read_bytes()
    bench.workspace.close()


def test_diff_tells_which_function_and_how_it_is_called(bench: Bench) -> None:
    (bench.folder / "reward.py").write_text(TWO)
    said = [{"entry": "right"}, {"entry": "brief"}, {"entry": "brief", "dialect": "verl"}]
    manifests = [plan(bench.file(uses(ref="reward.py", **one)), bench.workspace).manifest for one in said]
    (change,) = compare(bench.workspace.ledger, manifests[0], manifests[1])
    assert (change.before, change.after) == ("path:reward.py (right)", "path:reward.py (brief)")
    assert change.notes == ("entry: right → brief",)
    (change,) = compare(bench.workspace.ledger, manifests[1], manifests[2])
    assert change.notes == ("dialect: auto → verl",)


def test_plan_and_lineage_name_the_function(bench: Bench) -> None:
    (bench.folder / "reward.py").write_text(TWO)
    view = view_plan(bench.workspace, bench.file(uses(ref="reward.py", entry="brief")))
    grpo = next(stage for stage in view.stages if stage.name == "grpo")
    assert ("reward", "path:reward.py (brief)") in [(slot, name) for slot, name, _ in grpo.inputs]
    bench.workspace.catalog.add_reward(bench.folder / "reward.py", "two", entry="right")
    for entry, told in (("right", None), ("brief", ("entry", "brief"))):
        pinned = planned(bench, uses(ref="reward:two", entry=entry))
        used = Edge(pinned.name, "", "run:r/grpo", "reward", str(pinned.digest))
        inputs = {"reward": asdict(InputBlob(used.digest, pinned.form, pinned.name, pinned.meta))}
        stage = StageRecord("r", "grpo", 0, "grpo", "running", inputs=inputs)
        with bench.workspace.ledger.snapshot() as now:
            node = _input_node(Origins(bench.workspace.stores, now), stage, used)
        assert node.name == "reward:two@1"
        assert (told in node.details) if told else not dict(node.details).get("entry")
