"""The report and the comparison's page as commands write them, of a run whose texts try to be markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

import cli_world
import pytest
from cli_world import BAD_REWARD, World
from web_pages import LONG, LONG_RUN, TWO, rich_world

from posttrain.domain.errors import WorkspaceError


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, str]]:
    """A run that has ended."""
    with pytest.MonkeyPatch.context() as patch:
        world = rich_world(tmp_path_factory.mktemp("report"), patch, LONG_RUN)
        world.ok("run", "run.yaml")
        yield world, world.newest()


def report(world: World, run: str) -> str:
    return (world.root / ".posttrain" / "runs" / run / "report.html").read_text()


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html.partition("<body>")[2])).split())


@pytest.mark.slow
def test_the_report_shows_what_came_of_the_run(shown: tuple[World, str]) -> None:
    html = report(*shown)
    text = text_of(html)
    for words in (
        "0.980 [0.950, 0.995]", "before: base model:tiny@1", "items higher, lower, same 176, 0, 24",
        "sft: curves", "training loss", "gradient norm, before clipping", "grpo: curves", "mean training reward",
        "entropy per token", "KL to the reference", "held-out accuracy (probe)", "tokens per second", "learning rate",
        "grpo: responses during training", "step 1: 3 of the 3", "step 1500: 3 of the 3", "exact 2", "reward: error",
        "evaluate: answers to heldout (stage grpo)", "4 of 200 items are answered wrong",
        "1 greedy response to each item.",
        "base-eval: answers to heldout", "180 of 200 items are answered wrong", "Q: sort 1199", "nothing", "(empty)",
        "Time, throughput and memory", "rollout 500 ms 63 %", "2200 MiB", "704 MiB", "Hyperparameters",
        "prompts_per_step", "dataset:heldout@1", "Budget", "150,420", "Lineage",
    ):  # fmt: skip
        assert words in text, words
    assert text.index("evaluate: answers") < text.index("base-eval: answers"), "the released model's first"
    assert html.count("<script") == 0
    assert html.count("<img") == 0
    assert "script>document.title" in text, "shown as what it is"
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert len(html.encode()) < 2_000_000


def test_the_noise_that_is_known_is_shaded(shown: tuple[World, str]) -> None:
    html = report(*shown)
    panels = re.findall(r'<h4 class="mono">([^<]*)</h4>.*?</svg>', html, re.DOTALL)
    bodies = re.findall(r'<h4 class="mono">[^<]*</h4>(.*?)</section>', html, re.DOTALL)
    drawn = dict(zip(panels, bodies, strict=False))
    assert 'class="band' in drawn["reward/mean"]
    assert 'stroke-width="4"' in drawn["probe/accuracy"], "limits of eight items, at each of its points"
    assert 'class="band' not in drawn["entropy"]
    assert "reward/stderr" not in drawn, "it is the band, and needs no panel of its own"


@pytest.mark.slow
def test_a_comparison_of_two_runs_has_the_items_that_changed_hands(shown: tuple[World, str]) -> None:
    world, good = shown
    world.ok("asset", "add", "reward:sort", world.write("reward_v2.py", BAD_REWARD))
    world.write("second.yaml", TWO.replace("name: sort", "name: second"))
    whole = cli_world.write_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_world, "write_model", lambda folder, quality: whole(folder, 0.3))
        world("run", "second.yaml")
    said = world.json("compare", good, "second", "--html", "page.html")
    assert said["page"] == "page.html"
    html = (world.root / "page.html").read_text()
    text = text_of(html)
    for words in (
        "A sort and B second", "won, lost, tied 0, 136, 64", "difference from A, clear of 0", "-0.68 [-0.7",
        "B is right on 0 items on which A is wrong, and wrong on 136 items on which A is right", "lost: 16 of 136",
        "grpo: curves", "A sort", "B second", "Parameters that differ", "reward:sort@2", "stages.grpo.params.steps",
    ):  # fmt: skip
        assert words in text, words
    assert html.count("<script") == 0
    assert LONG[:60] in text
    assert "page:   page.html" in world.ok("compare", good, "second", "--html", "page.html")


def test_a_page_that_cannot_be_written_ends_in_one_line(shown: tuple[World, str]) -> None:
    world, good = shown
    result = world("compare", f"{good}/base-eval", good, "--html", "nowhere/page.html")
    assert result.exit_code == WorkspaceError.exit_code
    assert "cannot write nowhere/page.html" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_responses_that_are_gone_are_told_and_the_report_is_written(shown: tuple[World, str]) -> None:
    world, good = shown
    stages = world.json("get", good)["stages"]
    digest = next(s["outputs"]["items"]["digest"] for s in stages if s["name"] == "evaluate").partition(":")[2]
    path = world.root / ".posttrain" / "blobs" / "sha256" / digest[:2] / digest[2:]
    kept = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(b"items")
    try:
        world.ok("get", good, "--report")
        assert "evaluate: " in text_of(report(world, good)).partition("Scores")[0], "a warning at the top"
        assert "180 of 200 items are answered wrong" in text_of(report(world, good))
    finally:
        path.write_bytes(kept)
