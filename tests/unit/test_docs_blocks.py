"""Every block of code in README and docs is what it says: run files are planned, rewards score, commands parse.

What a reader types is run in tests/e2e (test_doc_commands.py, test_from_trl.py); here every block is looked at.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from cli_world import RUN, World, make_world

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from documents import ROOT, fences
from harness_folder import harness_folder
from pages import Block, blocks

from posttrain.app.gates import GateFile
from posttrain.cli.main import app
from posttrain.data.assets import inspect_reward
from posttrain.domain.placement import Cluster
from posttrain.domain.policies import ChannelPolicy
from posttrain.domain.runspec import RunSpec, parse_run_spec
from posttrain.engine.config import STAGE_CONFIGS, InitModelConfig, stage_config
from posttrain.sandbox.port import RewardCall
from posttrain.sandbox.process import open_reward

YAML = list(blocks("yaml"))
PYTHON = list(blocks("python"))
SHELL = [block for block in blocks("bash") if "<<" not in block.text]  # with files in it: run whole, end to end
REWARDS = [  # but those that call a model, which a stage serves
    block
    for block in PYTHON
    if re.search(r"^def (compute_)?score\(|^def \w+\(completions", block.text, re.MULTILINE)
    and "POSTTRAIN_" not in block.text
]
KNOWN = {"yaml", "python", "bash", "sh", "text", "mermaid", "toml"}


def test_every_block_says_its_language() -> None:
    pages = {page for block in blocks(*KNOWN) for page in [block.page]}
    assert len(YAML) > 10
    assert len(PYTHON) > 8
    assert len(SHELL) > 8
    for page in sorted(pages):
        marks = re.findall(r"^ *```(\S*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert {mark for mark in marks[::2] if not mark.startswith("{")} <= KNOWN | {""}, page


# --- YAML -------------------------------------------------------------------------------------------------------------


def merged(part: dict[str, Any]) -> dict[str, Any]:
    """A run file that has these keys; what a page leaves out, and what it writes as `…`, is a small run's."""
    run: dict[str, Any] = yaml.safe_load(RUN)
    if any(stage.get("kind") == "evaluate" for stage in part.get("stages", {}).values() if stage):
        del run["stages"]["evaluate"]
    for key, value in part.items():
        if value in ({"…": None}, ["…"]):
            continue
        run[key] = {**run[key], **value} if isinstance(run.get(key), dict) and isinstance(value, dict) else value
    return run


def parts(block: Block) -> Iterator[dict[str, Any]]:
    """The maps of a block; one in which a key stands several times shows as many ways to write it."""
    keys = re.findall(r"^(\w+):", block.text, re.MULTILINE)
    if len(set(keys)) < len(keys):
        assert len(set(keys)) == 1
        yield from (yaml.safe_load(way) for way in re.split(rf"^(?={keys[0]}:)", block.text, flags=re.MULTILINE) if way)
    else:
        yield yaml.safe_load(block.text)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A workspace with every asset and file that the pages name."""
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    world.ok("asset", "add", "dataset:sort-train", "train.jsonl")
    world.ok("asset", "add", "dataset:sort-heldout", "heldout.jsonl")
    world.ok("asset", "add", "model:tiny-sort", "base")
    for name in ("exact", "judge"):
        world.ok("asset", "add", f"reward:{name}", "reward.py")
    harness_folder(
        tmp_path / "harness", tmp_path, {"arc_easy": ["acc", "acc_norm"], "gsm8k": ["exact_match,strict-match"]}
    )
    world.ok("asset", "add", "harness:lm-eval", "harness")
    world.write("words.txt", "yes")
    pair = {"prompt": "Q: sort 21", "chosen": "A: 12", "rejected": "A: 21"}
    world.write("pairs.jsonl", "".join(json.dumps({**pair, "chosen": f"A: {i}"}) + "\n" for i in range(8)))
    labelled = [{"prompt": "Q: 1", "completion": f"A: {i}", "label": i > 3} for i in range(8)]
    world.write("labels.jsonl", "".join(json.dumps(row) + "\n" for row in labelled))
    world.write("best_of_n.py", (ROOT / "examples" / "04-best-of-n" / "best_of_n.py").read_text(encoding="utf-8"))
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a.txt").write_text("no")
    return world


def check(part: dict[str, Any], world: World) -> None:
    """Read a part of a run file, with a small run around it, as `plan` does; a channel's policy is set."""
    if set(part) <= set(Cluster.model_fields):
        Cluster.model_validate(part)
        return
    if set(part) <= set(ChannelPolicy.model_fields) and "suites" in part:
        world.ok("channel", "set-policy", "prod", world.write("policy.yaml", yaml.safe_dump(part)))
        return
    if set(part) <= set(GateFile.model_fields) and "ranges" in part:
        GateFile.model_validate(part)
        return
    if "jobs" in part:  # a workflow of GitHub
        steps = [shlex.split(step.get("run", "")) for job in part["jobs"].values() for step in job["steps"]]
        for words in (words for words in steps if words[:1] == ["posttrain"]):
            parse(words)
        return
    assert set(part) <= set(RunSpec.model_fields), "it is no part of a run file"
    run = merged(part)
    spec = parse_run_spec(run, "run.yaml")
    foreign = {s.kind for s in spec.stages.values()} - STAGE_CONFIGS.keys()  # of a package: test_plugins plans it
    foreign |= {s.trainer for s in spec.stages.values()} - {"native"}
    for stage in () if foreign else spec.stages.values():
        stage_config(stage.kind, stage.params)
    uses = [use for one in spec.rewards.values() for use in (one if isinstance(one, tuple | list) else [one])]
    packages = {str(use.ref).split(".")[0] for use in uses if re.match(r"\w+\.[\w.]+:\w+$", str(use.ref))}
    packages |= {name for name in spec.trackers.chosen() if name not in ("csv", "parquet")} if spec.trackers else set()
    packages |= {"ray" for stage in spec.stages.values() if "placement" in stage.params}
    if not packages | foreign:  # what names one is only parsed: here, with it or without, the same is tested
        world.write("run.yaml", yaml.safe_dump(run, sort_keys=False))
        planned = world.ok("plan", "run.yaml")
        assert all(name in planned for name in spec.stages)


@pytest.mark.parametrize("page", sorted({block.page for block in YAML}))
def test_every_yaml_block_of_a_page_is_planned(page: str, world: World) -> None:
    for block in (one for one in YAML if one.page == page):
        for part in parts(block):
            if block.file == "model.yaml":
                InitModelConfig.model_validate(part)
            elif "placement" not in part:  # of a stage; test_docs_run_yaml validates each
                try:
                    check(part, world)
                except (AssertionError, ValueError) as error:
                    raise AssertionError(f"{block}: {error}") from error


@pytest.mark.parametrize(
    "part",
    [
        {"stages": {"grpo": {"kind": "grpo", "data": "train", "reward": "exact", "steps": 3, "lr": 1.0}}},
        {"gates": [{"name": "a", "metric": "heldout/accuracy", "at_least": 90}]},
        {"data": {"train": "dataset:nobody"}},
        {"stage": {}},
    ],
)
def test_a_block_that_cannot_be_planned_is_noticed(part: dict[str, Any], world: World) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(part, world)


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_every_python_block_of_a_page_compiles(page: str) -> None:
    for block in (one for one in PYTHON if one.page == page):
        ast.parse(block.text, str(block))


@pytest.mark.parametrize("block", REWARDS, ids=str)
def test_every_reward_scores(block: Block, tmp_path: Path) -> None:
    tree = ast.parse(block.text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    source = "\n".join(ast.unparse(node) for node in functions)  # of a training script only the reward
    path = tmp_path / "reward.py"
    path.write_text(source)
    meta = inspect_reward(path, functions[0].name)
    chat = [{"role": "user", "content": "6 times 7 ="}]
    row = {"prompt": chat if "'content'" in source else "6 times 7 =", "answer": "42", "ground_truth": "42", "level": 2}
    row |= {"info": {}, "task": "", "data_source": "x"}
    given = RewardCall(["6 times 7 ="] * 2, ["42", "no idea"], [row] * 2, [(1,)] * 2, [(1, 2)] * 2)
    reward = open_reward(path, meta["entry"], timeout=300.0, dialect=meta["dialect"])
    try:
        scored = reward.score(given)
    finally:
        reward.close()
    assert [score.status for score in scored] == ["ok", "ok"], scored
    assert all(isinstance(score.score, float) for score in scored)


def test_the_rewards_of_all_pages_are_found() -> None:
    assert {block.page for block in REWARDS} >= {
        f"docs/howto/{name}.md" for name in ("from-trl", "from-verl", "from-verifiers", "reward")
    }


# --- shell ------------------------------------------------------------------------------------------------------------


def typed(block: Block) -> list[list[str]]:
    """The commands of a block, as words."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def parse(words: list[str]) -> None:
    """Hold a command against the command line's own parser; nothing is run."""
    command = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        assert rest, words
        assert rest[0] in command.commands, f"{' '.join(words)}: no such verb"
        command = command.commands[rest.pop(0)]
    command.make_context(" ".join(words), rest).close()


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL}))
def test_every_command_of_a_pages_shell_blocks_is_one_that_there_is(page: str) -> None:
    for block in (one for one in SHELL if one.page == page):
        assert typed(block), block
        for words in typed(block):
            if words[0] == "posttrain":
                parse(words)
            else:
                known = words[:2] in (["git", "clone"], ["pip", "install"]) or words[0] in ("export", "curl")
                assert known, f"{block}: {' '.join(words)}: no test knows it"


@pytest.mark.parametrize(
    "text", ["posttrain ship", "posttrain run", "posttrain plan run.yaml --fast", "posttrain asset"]
)
def test_a_command_that_there_is_not_is_noticed(text: str) -> None:
    with pytest.raises(BaseException):  # noqa: B017, PT011 - the parser's own usage error
        parse(shlex.split(text))


def test_what_init_says_of_the_verl_script_stands_on_its_page(world: World) -> None:
    page = ROOT / "docs" / "howto" / "from-verl.md"
    (script,) = fences(page, "sh")
    world.write("run_verl.sh", script)
    (world.root / "run.yaml").unlink()
    said = world.ok("init", "--from", "verl", "run_verl.sh")
    (shown,) = fences(page, "text")
    assert said.partition("\n")[2] == shown
