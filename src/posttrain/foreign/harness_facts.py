"""Runs among the packages of a harness, where there is no Posttrain: loads tasks, so that their data is in the cache.

`python harness_facts.py PROGRAM TASK…` prints JSON, `{"tasks": {NAME: TASK, …}, "groups": {NAME: [NAME, …]}}`, with the
fields of `domain.harnesses.Task`. The working folder has the files of further tasks.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_LETTERS = ("includes", "match", "exact", "pattern", "answer", "choice")  # scorers of Inspect


def lm_eval(names: list[str]) -> dict[str, Any]:
    """Return the facts of tasks and groups of lm-eval."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=os.getcwd())
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise LookupError(f"lm-eval has no task {unknown[0]!r}")
    found: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        tasks = manager.load([name])["tasks"]
        for leaf, task in tasks.items():
            filters = [one.name for one in getattr(task, "_filters", [])] or ["none"]
            found["tasks"][leaf] = {
                "version": str((task.config.metadata or {}).get("version", "")),
                "documents": len(list(task.eval_docs)),
                "metrics": {
                    metric + ("" if one == "none" else f",{one}"): getattr(how, "__name__", str(how))
                    for metric, how in task.aggregation().items()
                    for one in filters
                },
            }
        if list(tasks) != [name]:
            found["groups"][name] = list(tasks)
    return found


def inspect(names: list[str]) -> dict[str, Any]:
    """Return the facts of tasks of Inspect: `FILE.py`, `FILE.py@TASK`, or `PACKAGE/TASK`."""
    from inspect_ai._eval.loader import load_tasks
    from inspect_ai._util.registry import registry_info

    tasks: dict[str, Any] = {}
    for name in names:
        for task in load_tasks([name]):
            short = task.name.rpartition("/")[2]
            scorers = [registry_info(one).name.rpartition("/")[2] for one in task.scorer or []]
            kinds = {one: "letters" if one in _LETTERS else "unknown" for one in scorers}
            source = name if "/" in name or "@" in name else f"{name}@{short}"
            tasks[short] = {
                "version": str(task.version), "documents": len(task.dataset), "metrics": kinds, "source": source,
            }  # fmt: skip
    return {"tasks": tasks, "groups": {}}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print is no answer
    answers.write(json.dumps({"lm-eval": lm_eval, "inspect": inspect}[sys.argv[1]](sys.argv[2:])))
    answers.close()
