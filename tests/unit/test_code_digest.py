"""The code digest has every source that a job imports and that decides results; the rest is named here, with why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from posttrain.execution.trainers import native

ROOT = Path(native.__file__).parents[2]
DECIDES_NOTHING = {
    "domain/ports.py": "forms only; places where a test kills",
    "domain/errors.py": "words of errors, and which worker one is blamed on",
    "domain/gates.py": "judged on the control side, from what jobs measured",
    "domain/ids.py": "what people's names must be",
    "domain/jobs.py": "the form of orders, results and reports; what an order holds is in the cache key",
    "domain/manifest.py": "what it holds is in the cache key",
    "domain/plugins.py": "finds what is installed, whose own digest is in the cache key",
    "domain/jobspec.py": "the form of what an executor is asked for; an image's digest is in a stage's identity",
    "domain/overrides.py": "applied before the manifest is made",
    "domain/runspec.py": "what it holds is in the cache key",
    "domain/trackers.py": "where metrics are copied to",
    "domain/validation.py": "words of errors",
    "execution/executors/local/devices.py": "which devices a job has",
    "execution/machine.py": "the memory there is: it chooses sizes, which change rounding",
    "execution/trainers/native.py": "asked only whether there is a GPU",
    "execution/__init__.py": "says what the room is for",
    "execution/environment.py": "which variables a process is given",
    "execution/processes.py": "whose process it is",
    "store/retries.py": "what lets a job reach its inputs, known by their digest",
    "store/blobs.py": "keeps bytes, known by their digest; words of errors",
    "store/atomic.py": "keeps bytes, says where temporary files lie and who may delete",
    "store/attempts.py": "keeps bytes and what is said",
    "store/backends/__init__.py": "keeps bytes",
    "store/backends/local.py": "keeps bytes",
    "store/backends/remote.py": "keeps bytes",
    "store/backends/served.py": "fetches bytes, known by their digest",
    "store/mailbox.py": "keeps what is said",
    "store/mailboxes/folder.py": "keeps bytes",
    "store/mailboxes/objects.py": "keeps bytes",
    "store/mailboxes/served.py": "keeps what is said",
    "store/external.py": "whether a store's address is one",
    "store/signed.py": "asks a store to keep bytes",
    "store/trees.py": "keeps bytes, known by their digest; temporary files",
}
# of the server that a job launches, those that decide its answers: tokens, text, scores
LAUNCHED = {"serving/answers.py", "serving/texts.py", "serving/wire.py"}


def name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Also inside functions, and for types only: erring to the safe side."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached() -> set[str]:
    """Every source with something in it that `jobs` and `engine` import, directly or by way of another."""
    modules = {name(path): path for path in ROOT.rglob("*.py")}
    waiting = [module for module in modules if module.startswith(("posttrain.jobs.", "posttrain.engine."))]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += [found for found in imported(modules[module]) if found in modules]
    return {modules[module].relative_to(ROOT).as_posix() for module in seen}


def test_what_a_job_imports_is_in_the_code_digest_or_decides_nothing() -> None:
    digested, found = set(native._sources()["files"]), reached()
    assert len(found) > 100
    assert found >= {"domain/rewards.py", "pacing/balance.py", "planner/residency.py"}, "the graph is followed"
    assert sorted(found - digested - DECIDES_NOTHING.keys()) == [], "into the digest, or into the list with a reason"
    assert sorted(DECIDES_NOTHING.keys() & digested) == []
    assert sorted(DECIDES_NOTHING.keys() - found) == [], "no longer imported"
    assert found >= {path for path in digested - LAUNCHED if not path.startswith(("jobs/", "engine/", "sandbox/"))}
    assert digested >= LAUNCHED
