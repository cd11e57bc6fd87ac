"""Runs among the packages of a harness, where there is no Posttrain: loads tasks, so that their data is in the cache.

`python harness_facts.py PROGRAM TASK…` prints JSON, `{"tasks": {NAME: TASK, …}, "groups": {NAME: [NAME, …]}}`, with the
fields of `domain.harnesses.Task`. The working folder has the files of further tasks.
"""

from __future__ import annotations

import json
import os
import sys
from difflib import get_close_matches
from typing import Any

_LETTERS = ("includes", "match", "exact", "pattern", "answer", "choice")  # scorers of Inspect


def lm_eval(names: list[str]) -> dict[str, Any]:
    """Return the facts of tasks and groups of lm-eval."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=os.getcwd())
    for name in names:
        if name not in manager.all_tasks:
            close = get_close_matches(name, manager.all_tasks, 1)
            raise SystemExit(f"lm-eval has no task {name!r}{f' (did you mean {close[0]!r}?)' if close else ''}")
    found: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        loaded = manager.load([name])
        parts = loaded.get("group_map", {})

        def leaves(of: str, parts: dict[str, list[str]] = parts) -> list[str]:
            return [leaf for part in parts[of] for leaf in leaves(part)] if of in parts else [of]

        found["groups"] |= {group: leaves(group) for group in parts}
        for leaf, task in loaded["tasks"].items():
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
        if name not in parts and list(loaded["tasks"]) != [name]:  # a tag
            found["groups"][name] = list(loaded["tasks"])
    return found


def inspect(names: list[str]) -> dict[str, Any]:
    """Return the facts of tasks of Inspect: `FILE.py`, `FILE.py@TASK`, or `PACKAGE/TASK`."""
    from inspect_ai._eval.loader import load_tasks
    from inspect_ai._util.registry import registry_info

    tasks: dict[str, Any] = {}
    for name in names:
        loaded = load_tasks([name])
        if not loaded:
            raise SystemExit(f"Inspect has no task {name!r}; name FILE.py, FILE.py@TASK or PACKAGE/TASK")
        for task in loaded:
            scorers = [registry_info(one).name.rpartition("/")[2] for one in task.scorer or []]
            kinds = {one: "letters" if one in _LETTERS else "unknown" for one in scorers}
            source = name if "@" in name or task.name == name else f"{name}@{task.name}"
            tasks[task.name] = {
                "version": str(task.version), "documents": len(task.dataset), "metrics": kinds, "source": source,
            }  # fmt: skip
    return {"tasks": tasks, "groups": {}}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print is no answer
    answers.write(json.dumps({"lm-eval": lm_eval, "inspect": inspect}[sys.argv[1]](sys.argv[2:])))
    answers.close()
