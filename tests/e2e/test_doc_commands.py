"""Every command that README and docs tell a reader to type is run, or is one that a make target runs in CI.

`make` and benchmark commands are matched to what CI runs; every `posttrain` command is run through the real command
line in a workspace of its own, the README's own sequence first, with the names that a reader would put in.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documents import ROOT, Command, commands, fences
from tiny_run import MODEL, RUN, SHORT, training_row
from workbench import Workbench

from ci_lanes import ci
from posttrain.cli.main import app
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.files import character_tokenizer, initial_model, save_model
from posttrain.engine.models.language_model import adopt_module

COMMANDS = list(commands())
README = ROOT / "README.md"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
VERBS = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
SUITES = {
    "rollout",
    "versions",
    "demo",
    "training",
    "adapters",
    "answering",
    "dispatch",
    "controller",
    "overlap",
    "turns",
    "meanwhile",
    "logprobs",
    "per_token",
    "tracing",
    "streaming",
    "weights",
    "staging",
    "starting",
    "transitions",
    "ledger",
    "real_runs",
    "gates",
    "serving",
    "watching",
}  # test_benchmarks runs them small


def named(command: Command) -> str:
    return f"{command.page}:{command.line} {command.text[:40]}"


def is_make(words: list[str]) -> bool:
    """A target there is, that CI runs: by its name, or as a part of one."""
    lanes = {lane.name for lane in (*ci.CHECKS, *ci.ALWAYS, *ci.OTHERS)}
    lanes |= {"test", "everything", "slow"}  # several lanes each
    # checked (`golden`, by lint `format`, `english`) or run small: tiny benchmarks and learning, some mutants, a seed
    # of the fuzz, 20 of chaos; and by `make dist` one of the demos, drawn by the commit
    by_hand = {"golden", "format", "english", "bench", "levels", "mutants", "fuzz", "chaos", "demos", "learning"}
    return len(words) == 2 and words[0] == "make" and words[1] in lanes | by_hand


def is_install(words: list[str]) -> bool:
    """What the Makefile installs, by its short options."""
    short = {"--constraint": "-c", "--editable": "-e", "--quiet": ""}
    targets = re.findall(r"\$\(PIP\) install (.*)", MAKEFILE)
    known = [sorted(filter(None, (short.get(w, w.strip("'")) for w in line.split()))) for line in targets]
    return words[:2] == ["pip", "install"] and sorted(words[2:]) in known


def is_benchmark(words: list[str]) -> bool:
    """`python -m benchmarks[.SUITE]` with options that the suite has."""
    if len(words) < 3 or words[0] not in ("python", ".venv/bin/python") or words[1] != "-m":
        return False
    package, _, suite = words[2].partition(".")
    if package != "benchmarks" or (suite and suite not in SUITES):
        return False
    source = (ROOT / "benchmarks" / f"{suite or '__main__'}.py").read_text(encoding="utf-8")
    return all(f'"{word}"' in source for word in words[3:] if word.startswith("--"))


def is_mutants(words: list[str]) -> bool:
    """`python -m mutants` with options that it has: tests/e2e/test_mutants.py runs it."""
    source = (ROOT / "mutants" / "__main__.py").read_text(encoding="utf-8")
    return words[:3] == ["python", "-m", "mutants"] and all(f'"{word}"' in source for word in words[3:])


def is_demo(words: list[str]) -> bool:
    """A demo that CI plays: `make demo`, and by `make dist` one of those of `make demos`, drawn by the commit."""
    played = re.search(r"^demos:.*\n\t.*TASKS\),([\d ]+)\);", MAKEFILE, re.MULTILINE)
    assert played
    task = words[words.index("--task") + 1] if "--task" in words else "01"
    return words[:2] == ["posttrain", "demo"] and task in ("01", *played.group(1).split())


def is_agent(words: list[str]) -> bool:
    """What an executor starts on a node: tests/contract/test_agent.py does."""
    return words == ["python", "-m", "posttrain.execution.agent", "MAILBOX"]


def is_of_a_cluster(words: list[str]) -> bool:
    """What needs a cluster or an object store: tests/e2e/test_clusters.py types it (make slurm, make ray)."""
    return words[:2] == ["posttrain", "executor"] or (words[:2] == ["posttrain", "init"] and "--mailboxes" in words)


def is_of_a_served_model(words: list[str]) -> bool:
    """What runs until it is ended: tests/e2e/test_served_models.py types it."""
    return words[:1] == ["posttrain"] and words[1] in ("serve-model", "chat")


def is_of_a_harness(words: list[str]) -> bool:
    """What needs packages and data of others: tests/evals/test_harnesses.py types it, with tasks on local data."""
    return words[:2] == ["posttrain", "harness"] or "harness:lm-eval" in words


MATCHED: list[Callable[[list[str]], bool]] = [
    *(is_make, is_install, is_benchmark, is_mutants, is_demo, is_agent, is_of_a_cluster),
    is_of_a_served_model,
    is_of_a_harness,
]


def run_here(command: Command) -> bool:
    """Whether the slow test below types it."""
    words = command.words
    return (
        words[0] == "posttrain"
        and words[1] in {*VERBS, "--help"} - {"demo", "serve-model", "chat"}
        and not is_of_a_cluster(words)
        and not is_of_a_harness(words)
    )


@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_every_command_of_a_page_is_known(page: str) -> None:
    known = {
        named(one): run_here(one) or any(match(one.words) for match in MATCHED) for one in COMMANDS if one.page == page
    }
    assert [name for name, found in known.items() if not found] == [], "no test runs them"


@pytest.mark.parametrize(
    "text",
    ["make tea", "pip install posttrain", "python -m benchmarks.speed", "python -m benchmarks.dispatch --fast",
     "posttrain demo --task 09", "posttrain ship", "git push", "rm -rf /"],
)  # fmt: skip
def test_an_unknown_command_is_found(text: str) -> None:
    command = Command("x.md", 1, text)
    assert not run_here(command)
    assert not any(matches(command.words) for matches in MATCHED)


def test_the_pages_have_the_commands_that_are_looked_for() -> None:
    texts = [command.text for command in COMMANDS if command.page == "README.md"]
    assert sum(text.startswith("posttrain") for text in texts) > 15
    assert any(text.startswith("make demo") for text in texts)
    assert "posttrain rollback prod" in texts


_FIGURE = re.compile(r" 0\.\d{4} |\d\.\d+x|\.\d+ %|\d ms\b|\.\d\d → \.\d\d|\d tok/s")


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/gates.md"])
def test_every_figure_names_its_command_and_version(page: str) -> None:
    """By section: what was typed, and the commit that it was typed at; in README the day."""
    sections = re.split(r"^## ", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    measured = [section for section in sections if _FIGURE.search(section)]
    assert measured or page == "docs/gates.md"
    for section in measured:
        title = section.partition("\n")[0]
        version = r"20\d\d-\d\d-\d\d" if page == "README.md" else r"commit\s`[0-9a-f]{7}`"
        assert re.search(version, section), f"{page}, {title}: no version"
        assert re.search(r"make (bench|levels|demo)|-m benchmarks", section), f"{page}, {title}: no command"


# --- as a reader types them -------------------------------------------------------------------------------------------


def write_files(bench: Workbench) -> None:
    """What the README's sequence takes from the reader: a model folder, two data sets, a reward, a run file."""
    rng = random.Random(3)
    tokenizer = character_tokenizer(InitModelConfig().characters)
    module = initial_model(InitModelConfig(**MODEL), tokenizer, 3)
    save_model(adopt_module(module), tokenizer, bench.folder / "path" / "to" / "huggingface-folder")
    for name, count in (("train", 64), ("heldout", 30)):
        bench.write(f"{name}.jsonl", "".join(json.dumps(training_row(rng)) + "\n" for _ in range(count)))
    bench.write("reward.py", SHORT)
    stages: dict[str, Any] = {**RUN["stages"], "grpo": {**RUN["stages"]["grpo"], "reward": "exact"}}
    run = {**RUN, "model": "model:base", "rewards": {"exact": "reward:exact"}, "stages": stages}
    run["gates"] = [{"name": "room", "metric": "heldout/response_tokens", "at_most": 23.9}]
    bench.write("run.yaml", run)
    bench.write("gates.yaml", {"gates": [{"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.9}]})
    rates = {"metric": ["heldout/accuracy"] * 200, "item_id": [f"i{item}" for item in range(200)], "value": [1.0] * 200}
    ends = {"binary": [True] * 200, "low": [0.0] * 200, "high": [1.0] * 200}
    pq.write_table(pa.table({**rates, **ends}), bench.folder / "results.parquet")


def filled_in(words: list[str], runs: list[str], sample: str) -> list[str]:
    """The words with what a reader would put in the place of examples."""
    ids = iter(runs)
    known = {"RUN": runs[0] if runs else "", "OTHER": runs[-1] if runs else "", "CHANNEL": "prod"}
    known |= {"12.384.3": sample, "ID": sample, "STAGE": "grpo"}
    filled = []
    for word in words:
        if re.fullmatch(r"sort-(brief-)?[0-9a-z]{8}", word):  # a run id
            word = next(ids)
        elif word.endswith("/run.yaml"):
            word = "run.yaml"
        filled.append(known.get(word, word))
    return filled


def sample_of(bench: Workbench, run_id: str) -> str:
    """A sample that left its way in the trace."""
    recorded = bench.run("trace", run_id, "--samples", "-o", "json").json
    return str(recorded["samples"][0]["id"])


@pytest.mark.slow
@pytest.mark.first
def test_every_command_of_the_command_line_does_what_a_reader_expects(tmp_path: Path) -> None:
    bench = Workbench(tmp_path)
    write_files(bench)
    typed = [command for command in COMMANDS if run_here(command)]
    own = [command for command in typed if command.page == "README.md" and command.text.startswith("posttrain ")]
    first = next(index for index, command in enumerate(own) if command.words[1] == "init")
    last = next(index for index, command in enumerate(own) if index > first and command.words[1] == "run")
    try:
        for command in own[first : last + 1]:
            bench.run(*command.words[1:])
        runs = [bench.run_id()]
        for seed in ("6", "7"):  # releases to go back from, and runs to compare
            bench.run("run", "run.yaml", "--seed", seed)
            runs.append(bench.run_id())
        sample = sample_of(bench, runs[0])
        rest = [command for command in typed if command not in own[first : last + 1]]
        assert len(rest) > 8
        tried, failed = set[tuple[str, ...]](), list[str]()  # pages repeat each other
        for command in rest:
            words = filled_in(command.words, runs, sample)
            if command.inline and len(words) == 2:
                words.append("--help")
            if tuple(words) in tried:
                continue
            tried.add(tuple(words))
            ended = bench.run(*words[1:], code=None)
            if ended.code:
                failed.append(f"{named(command)}: {ended.out}{ended.err}")
        assert not failed, "\n".join(failed)
        for block in fences(README, "python"):
            _python(block, bench.folder)
    finally:
        bench.clean()


@pytest.mark.journey
@pytest.mark.slow
def test_the_run_that_get_started_pastes_into_an_empty_folder_is_shipped(tmp_path: Path) -> None:
    (block,) = fences(ROOT / "docs" / "get-started.md", "bash")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("POSTTRAIN_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    bench = Workbench(tmp_path / "last-digit")
    try:
        done = subprocess.run(
            ["bash", "-ec", block], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900,
            env={**environment, "PATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        told = [line for line in done.stderr.splitlines() if not line.startswith("creating model:tiny in a run")]
        assert not told, "nothing but what is waited for"
        assert "warning" not in done.stdout
        assert "accuracy         PASS" in done.stdout
        assert "prod now points at" in done.stdout
        assert bench.run("verify", "prod").out.endswith("everything matches\n")
    finally:
        bench.clean()


def _python(block: str, folder: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("POSTTRAIN_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", block], cwd=folder, capture_output=True, text=True, check=False, timeout=400,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
