"""Every step of the demo through the public command: declare, train, judge, ship, roll back, prove.

Training is a dozen steps here, so the rewards are about length, which a policy learns at once: `short` (run A), its
second edition that rewards the opposite (run B), and `rich` (run C).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_run import RUN, once
from workbench import Reference, Workbench

from posttrain.domain.canonical import digest_bytes

pytestmark = [pytest.mark.slow, pytest.mark.journey]

LONG = '''
def score(completion: str) -> float:
    """Guideline: the longer the better."""
    return len(completion) / 24
'''
RICH = '''
def score(completion: str) -> float:
    """Guideline: at least twenty characters."""
    return min(len(completion), 20) / 20
'''
FULLER = {
    "name": "fuller",
    "metric": "heldout/response_tokens",
    "direction": "higher",
    "better_than": "channel",
    "by": 3,
}
NO_REGRESSION = {"name": "no-regression", "metric": "heldout/accuracy", "not_worse_than": "channel", "margin": 0.5}


@dataclass(frozen=True, slots=True)
class Story:
    """The workspace after the three runs, and how each command ended."""

    bench: Workbench
    a: str
    b: str
    c: str
    rejected: str  # what run B said on stderr
    live_after_b: list[dict[str, Any]]  # the channels, as `ls` told them then
    files: list[str]  # report and curves, as run C printed them


@pytest.fixture(scope="session")
def story(reference: Reference, shared: Path) -> Story:
    """Run A is the session's undisturbed run; B and C follow it in a copy of its workspace."""
    bench, known = once(shared / "story", play, origin=reference.bench)
    return Story(bench, reference.run_id, **known)


def play(bench: Workbench) -> dict[str, Any]:
    """The vendor changes the reward, and run B is the same command again; run C has a reward of its own."""
    bench.write("reward.py", LONG)
    bench.run("asset", "add", "reward:length", "reward.py")
    rejected = bench.run("run", "run.yaml", code=3)
    b = bench.run_id()
    channels = bench.run("ls", "-o", "json").json["channels"]
    raw = copy.deepcopy(RUN) | {"name": "rich", "gates": [NO_REGRESSION, FULLER]}
    raw["rewards"]["length"] = "reward:rich@1"
    bench.write("rich.py", RICH)
    bench.write("run-c.yaml", raw)
    bench.run("asset", "add", "reward:rich", "rich.py")
    shipped = bench.run("run", "run-c.yaml")
    files = [line.split(": ")[1] for line in shipped.out.splitlines() if line.startswith(("report: ", "curves: "))]
    known = {"b": b, "c": bench.run_id(), "rejected": rejected.error, "live_after_b": channels, "files": files}
    bench.wait_quiet()
    return known


def channel(bench: Workbench) -> dict[str, Any]:
    """What prod points at."""
    (live,) = bench.run("ls", "-o", "json").json["channels"]
    return dict(live)


def stages(bench: Workbench, run_id: str) -> dict[str, dict[str, Any]]:
    """The stages of a run by name."""
    return {stage["name"]: stage for stage in bench.run("get", run_id, "-o", "json").json["stages"]}


def nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A lineage, flat."""
    yield tree
    for child in tree["children"]:
        yield from nodes(child)


def test_assets_have_versions_and_digests(story: Story) -> None:
    found = {asset["ref"]: asset for asset in story.bench.run("asset", "ls", "-o", "json").json}
    trained = {ref for ref in found if "/" in ref}
    assert set(found) - trained == {
        *("model:tiny@1", "dataset:train@1", "dataset:heldout@1"),
        *("reward:length@1", "reward:length@2", "reward:rich@1"),
    }
    assert trained
    assert {found[ref]["kind"] for ref in trained} == {"model"}
    for name in ("train", "heldout"):
        data = (story.bench.folder / f"{name}.jsonl").read_bytes()
        assert found[f"dataset:{name}@1"]["digest"] == digest_bytes(data)
    assert found["reward:length@2"]["meta"]["source_digest"] == digest_bytes(LONG.encode())
    assert "longer the better" in found["reward:length@2"]["meta"]["guideline"]


def test_the_same_content_is_the_same_version(story: Story) -> None:
    assert "reward:rich@1" in story.bench.run("asset", "add", "reward:rich", "rich.py").out


def test_run_a_shipped(reference: Reference, story: Story) -> None:
    with story.bench.open() as workspace:
        first = workspace.ledger.history("prod")[0]
    assert (first.run_id, first.action, first.model_digest) == (story.a, "promote", reference.outputs["grpo"])
    done = stages(story.bench, story.a)
    assert {name: stage["state"] for name, stage in done.items()} == {
        **dict.fromkeys(("sft", "grpo", "evaluate", "gate", "release"), "succeeded"),
        "baseline-evaluate": "skipped",
    }


def test_run_b_is_rejected_and_nothing_ships(story: Story) -> None:
    assert story.rejected.startswith(f"run {story.b}: ")
    assert "gate" in story.rejected
    (live,) = story.live_after_b
    assert (live["run_id"], live["sequence"]) == (story.a, 1)
    told = story.bench.run("get", story.b, "-o", "json").json
    assert (told["state"], told["reason"]) == ("rejected", "GateFailed")
    assert stages(story.bench, story.b)["release"]["state"] == "pending"
    story.bench.check(story.b, "rejected")


def test_why_names_number_miss_and_confidence(story: Story) -> None:
    told = story.bench.run("why", story.b, "-o", "json").json
    verdict = next(v for v in told["gates"]["verdicts"] if v["gate"] == "length")
    assert (verdict["metric"], verdict["outcome"], verdict["confidence"]) == ("heldout/response_tokens", "fail", 0.95)
    assert verdict["missed_by"] > 0
    text = story.bench.run("why", story.b).out
    for word in ("heldout/response_tokens", f"by {verdict['missed_by']:.4g}", "95 % confidence limit"):
        assert word in text
    assert f"posttrain diff {story.a} {story.b}" in text


def test_diff_names_the_reward_and_its_source(story: Story) -> None:
    told = story.bench.run("diff", story.a, story.b, "-o", "json").json
    (changed,) = told["differences"]
    assert changed["path"] == "stages.grpo.inputs.reward"
    assert (changed["before"], changed["after"]) == ("reward:length@1", "reward:length@2")
    assert any("source_digest" in note and digest_bytes(LONG.encode()) in note for note in changed["notes"])
    assert "reward:length@2" in story.bench.run("diff", story.a, story.b).out


def test_run_c_is_better_and_ships(story: Story) -> None:
    verdicts = story.bench.run("why", story.c, "-o", "json").json["gates"]["verdicts"]
    assert [(v["gate"], v["outcome"]) for v in verdicts] == [("no-regression", "pass"), ("fuller", "pass")]
    with story.bench.open() as workspace:
        promoted = workspace.ledger.history("prod")[1]
    assert (promoted.run_id, promoted.action) == (story.c, "promote")
    story.bench.check(story.c)


def test_the_runs_share_the_sft_stage(story: Story) -> None:
    told = [stages(story.bench, run)["sft"] for run in (story.a, story.b, story.c)]
    assert [stage["cached_from"] for stage in told] == [None, f"{story.a}/sft", f"{story.a}/sft"]
    assert len({stage["outputs"]["model"]["digest"] for stage in told}) == 1
    assert stages(story.bench, story.b)["baseline-evaluate"]["cached_from"] == f"{story.a}/evaluate"


def test_report_and_curves_are_written(story: Story) -> None:
    report, curves = map(Path, story.files)
    assert report.read_text().startswith("<!")
    assert story.c in report.read_text()
    assert curves.read_bytes().startswith(b"\x89PNG")


def test_lineage_goes_back_to_the_sources(story: Story) -> None:
    tree = story.bench.run("lineage", story.c, "-o", "json").json
    found = {node["name"]: node for node in nodes(tree)}
    assert found["dataset:train@1"]["digest"] == digest_bytes((story.bench.folder / "train.jsonl").read_bytes())
    assert found["reward:rich@1"]["details"]["source_digest"] == digest_bytes(RICH.encode())
    assert found["model:tiny@1"]["details"]["architecture"] == "Qwen3ForCausalLM"
    manifest = next(node for node in nodes(tree) if node["kind"] == "manifest" and node["name"] == story.c)
    assert manifest["digest"] == story.bench.run("get", story.c, "-o", "json").json["manifest"]


def test_rollback_lineage_and_verify_of_what_is_live(reference: Reference, story: Story, tmp_path: Path) -> None:
    bench = story.bench.copy(tmp_path / "bench")
    assert channel(bench)["run_id"] == story.c
    assert story.a in bench.run("rollback", "prod").out
    live = channel(bench)
    assert (live["run_id"], live["action"], live["sequence"]) == (story.a, "rollback", 3)
    assert live["model_digest"] == reference.outputs["grpo"]
    names = {node["name"] for node in nodes(bench.run("lineage", "prod", "-o", "json").json)}
    assert names >= {"prod", "dataset:train@1", "dataset:heldout@1", "reward:length@1", "model:tiny@1", story.a}
    proof = bench.run("verify", "prod", "-o", "json").json
    assert proof["ok"]
    assert proof["checked"] >= 8
    flip(bench, "reward:length@1")
    broken = bench.run("verify", "prod", code=8)
    assert "reward:length@1" in broken.err
    assert "everything matches" not in broken.out


def flip(bench: Workbench, ref: str) -> None:
    """Change one byte of an asset's blob."""
    with bench.open() as workspace:
        digest = workspace.catalog.find(ref).digest.removeprefix("sha256:")
    blob = bench.root / "blobs" / "sha256" / digest[:2] / digest[2:]
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)


def test_a_second_submit_attaches_and_again_starts_another(bench: Workbench, reference: Reference) -> None:
    attached = bench.run("run", "run.yaml")
    assert f"attached to run {reference.run_id}: succeeded" in attached.out
    assert bench.run_id() == reference.run_id
    again = bench.run("run", "run.yaml", "--again")
    other = bench.run_id()
    assert other != reference.run_id
    assert f"run {other}" in again.out
    bench.check(other)
    assert bench.outputs(other) == reference.outputs
    assert {stage["cached_from"] for stage in stages(bench, other).values()} >= {f"{reference.run_id}/grpo"}
    assert channel(bench)["sequence"] == 1  # it points there already


def test_a_locked_manifest_is_the_same_run(bench: Workbench, reference: Reference) -> None:
    bench.run("lock", "run.yaml")
    (locked,) = bench.folder.glob("*.lock*")
    assert json.loads(locked.read_text())
    assert f"attached to run {reference.run_id}" in bench.run("run", locked.name).out
