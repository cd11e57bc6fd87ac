"""The verbs of `Control` as requests: one table, by which the server answers and the client asks.

Parameters that the path names come from it; the others are the query of a GET and the JSON body of anything else, by
their names. Files of whoever asks are uploaded by digest first, and named here by a `FileRef` or a `RunFile`. What is
called back meanwhile stays on the client's side.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_origin

from pydantic import Field

from posttrain.api.codec import signature
from posttrain.api.pages import CURSOR, LIMIT, LISTS, MOST, USUAL
from posttrain.api.versions import API_VERSION
from posttrain.domain.overrides import Override

PREFIX = f"/v{API_VERSION}/projects/{{project}}"
_NAMED = re.compile(r"{(\w+)}")


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file or a folder of whoever asks, in the store: `FileRef("train.jsonl", "sha256:…", "file")`."""

    name: str  # its last part, as it is called where it lies
    digest: str
    form: str  # file | tree


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run file with the local files that it names, which are rewritten to the names they have in `files`."""

    name: str  # as errors call it
    text: str
    files: Mapping[str, FileRef] = field(default_factory=dict)  # relative path in the text → what lies there


@dataclass(frozen=True, slots=True)
class Operation:
    """A verb as a request."""

    verb: str
    method: str  # GET | POST | PUT | DELETE
    path: str  # below the project
    heavy: bool = False  # it reads files, or computes: a worker answers it

    @property
    def whole_path(self) -> str:
        """With the project."""
        return PREFIX + self.path

    @property
    def in_path(self) -> tuple[str, ...]:
        """The parameters that the path names."""
        return tuple(_NAMED.findall(self.path))

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Name → parameter as it is sent, those of the path too."""
        return dict(_sent(self.verb))

    @property
    def looks_at_jobs(self) -> bool:
        """Whether the host that has the jobs of a run answers best: it alone can read what they say."""
        return "run_id" in self.in_path and (not self.unsafe or self.verb == "retry")

    @property
    def unsafe(self) -> bool:
        """Whether it may change something, so that a repeated request must be known as one."""
        return self.method != "GET"

    @property
    def paged(self) -> bool:
        """Whether it answers with pages of a list."""
        return self.verb in LISTS


def _sent(verb: str) -> Iterator[tuple[str, inspect.Parameter]]:
    """A verb's parameters as they are sent."""
    for name, kind in _OTHERWISE.get(verb, {}).items():
        yield name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    if verb in _OTHERWISE:
        return
    for name, one in signature(verb).parameters.items():
        kind, many = one.annotation, one.kind is inspect.Parameter.VAR_POSITIONAL
        if get_origin(kind) is Callable or name in CALLED_BACK.get(verb, ()):
            continue
        if _is_path(kind):
            kind = RunFile if verb in RUN_FILES else FileRef if kind is Path else FileRef | None
        if name == LIMIT and verb in LISTS:
            continue
        default = () if many else one.default
        kind = list[kind] if many else kind  # type: ignore[valid-type]
        yield name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
    for name, (kind, default) in _PAGE.items() if verb in LISTS else ():
        yield name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


_PAGE: Mapping[str, tuple[Any, Any]] = {
    LIMIT: (Annotated[int, Field(ge=1, le=MOST)], USUAL),
    CURSOR: (str | None, None),
}


def _is_path(kind: Any) -> bool:
    return kind is Path or kind == Path | None


RUN_FILES = ("plan", "lock", "submit", "plan_sweep")  # whose path is a run file
CALLED_BACK: Mapping[str, tuple[str, ...]] = {  # parameters that stay on the client's side, beside callables
    "export": ("folder", "progress"),
    "write_trace": ("folder",),
    "trackers": ("wait",),
}


_SWEEP = {"path": RunFile, "overrides": list[Override], "seeds": int, "metric": str | None, "better": str | None}
_OTHERWISE: Mapping[str, Mapping[str, Any]] = {  # parameters that are values which the server has, by what names them
    "scores": {"run_id": str},
    "curves": {"ref": str},
    "compare": {"words": list[str], "page": bool},
    "import_mlflow": {"folder": FileRef, "name": str | None},  # as `foreign.outside` has it
    "evaluate": {  # files: relative path in the words → what lies there
        **{"model": str, "suites": list[str], "settings": dict[str, Any], "runtime": dict[str, Any]},
        **{"reward": dict[str, Any] | None, "seed": int, "again": bool, "files": dict[str, FileRef]},
    },
    "submit_point": {**_SWEEP, "place": int, "seed": int},
    "rank": {**_SWEEP, "runs": list[tuple[int, int, str]]},
}


def _operations() -> Iterator[Operation]:
    for verb, words in _TABLE.items():
        method, path, *heavy = words.split()
        yield Operation(verb, method, path, bool(heavy))


_TABLE = {
    # submissions
    "plan": "POST /plans heavy",
    "lock": "POST /locks heavy",
    "submit": "POST /runs heavy",
    "evaluate": "POST /evaluations heavy",
    "detach": "POST /runs/{run_id}/detach",
    "signal": "POST /runs/{run_id}/signals",
    "stop": "POST /runs/{run_id}/stop",
    "retry": "POST /runs/{run_id}/retry",
    # runs
    "ls": "GET /runs",
    "queue": "GET /queue",
    "ids": "GET /run-ids",
    "run": "GET /runs/{words}",
    "status": "GET /runs/{run_id}/status",
    "manifest": "GET /runs/{run_id}/manifest",
    "scores": "GET /runs/{run_id}/scores heavy",
    "driver": "GET /runs/{run_id}/driver",
    "why": "GET /runs/{run_id}/why heavy",
    "diff": "GET /diffs heavy",
    "compare": "POST /comparisons heavy",
    "samples": "GET /runs/{run_id}/samples heavy",
    "sample": "GET /runs/{run_id}/samples/{sample} heavy",
    "trackers": "GET /runs/{run_id}/trackers heavy",
    "write_report": "GET /runs/{run_id}/report heavy",
    "write_trace": "GET /runs/{run_id}/trace heavy",
    "track": "POST /runs/{run_id}/trackers heavy",
    # channels
    "channels": "GET /channels",
    "live": "GET /releases",
    "channel": "GET /channels/{name}",
    "channel_record": "GET /channels/{name}/record",
    "channel_trackers": "GET /channels/{name}/trackers heavy",
    "track_channel": "POST /channels/{name}/trackers heavy",
    "promote": "POST /channels/{channel}/releases heavy",
    "rollback": "POST /channels/{channel}/rollback heavy",
    "approve": "POST /approvals heavy",
    "reject": "POST /rejections heavy",
    "approval_requests": "GET /channels/{channel}/approvals heavy",
    "policy": "GET /channels/{name}/policy heavy",
    "policies": "GET /channels/{name}/policies",
    "history": "GET /channels/{name}/history",
    "channel_events": "GET /channels/{name}/events/{kind}",
    "set_policy": "PUT /channels/{name}/policy heavy",
    "remove_policy": "DELETE /channels/{name}/policy heavy",
    "protect": "PUT /channels/{name}/protection heavy",
    "freeze": "PUT /channels/{name}/freeze heavy",
    "unfreeze": "DELETE /channels/{name}/freeze heavy",
    # records
    "lineage": "GET /lineage heavy",
    "downstream": "GET /downstream heavy",
    "verify": "POST /verifications heavy",
    "dead": "GET /dead heavy",
    "look_again": "POST /dead/retry heavy",
    "assume_dead": "POST /dead/assume heavy",
    "erase": "POST /erasures heavy",
    "gc": "POST /garbage-collections heavy",
    # assets
    "assets": "GET /assets",
    "asset": "GET /asset",
    "asset_status": "GET /asset-status",
    "recalled": "POST /recalled",
    "add_dataset": "POST /assets/datasets heavy",
    "add_external": "POST /assets/external heavy",
    "add_model": "POST /assets/models heavy",
    "add_reward": "POST /assets/rewards heavy",
    "create_model": "POST /assets/made-models heavy",
    "mark": "POST /assets/marks heavy",
    "import_trl_output": "POST /imports/trl heavy",
    "import_mlflow": "POST /imports/mlflow heavy",
    "import_wandb_export": "POST /imports/wandb heavy",
    # sinks
    "sinks": "GET /sinks",
    "add_sink": "POST /sinks heavy",
    "test_sink": "POST /sinks/{name}/test heavy",
    "pause_sink": "POST /sinks/{name}/pause",
    "resume_sink": "POST /sinks/{name}/resume heavy",
    "remove_sink": "DELETE /sinks/{name}",
    "curves": "GET /curves heavy",
    # models
    "ask": "POST /answers heavy",
    "export": "POST /exports heavy",
    "plan_sweep": "POST /sweeps/plans heavy",
    "submit_point": "POST /sweeps/runs heavy",
    "rank": "POST /sweeps/ranks heavy",
    # access
    "whoami": "GET /whoami",
    "add_project": "POST /projects",
    "images": "GET /images",
    "allow_image": "POST /images",
    "remove_image": "POST /images/removal",
    "members": "GET /members",
    "set_member": "PUT /members/{principal}",
    "tokens": "GET /tokens",
    "issue_token": "POST /tokens",
    "rotate_token": "POST /tokens/{token_id}/rotation",
    "revoke_token": "DELETE /tokens/{token_id}",
}
OPERATIONS: Mapping[str, Operation] = {one.verb: one for one in _operations()}
# what the client does with other requests, or by itself (see client.remote)
ELSEWHERE = frozenset(("drive", "watcher", "vigil", "logs", "outcome", "follow", "close"))
OF_PAGES = frozenset(("report", "comparison"))  # what the server's own pages ask, of which a client gets the pages
