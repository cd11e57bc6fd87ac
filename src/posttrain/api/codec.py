"""Values as JSON and back, by the types that verbs are annotated with.

pydantic does the work. What is written here is where the names are found that modules import for the type checker
alone: a room of values must not load the rooms below, and whoever decodes a value has to.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation

_WHERE = {  # room → names of it that modules import for type checking only
    "collections.abc": "Iterator Mapping Sequence",
    "pathlib": "Path",
    "posttrain.api.access": "Issued Whoami",
    "posttrain.api.control": "Vigil Watcher",
    "posttrain.api.values": (
        "Asked ChannelView Collected Dead Erasure Exported Locked Marked Point Ranked RunDiff Submitted Sweep Why"
    ),
    "posttrain.control.comparing": "Cell Comparison Difference ImportedHistory MetricRow",
    "posttrain.control.downstream": "Downstream",
    "posttrain.control.lineage": "Node",
    "posttrain.control.planning": "Planned Resolve",
    "posttrain.control.scores": "Scores",
    "posttrain.control.verifying": "VerifyReport",
    "posttrain.data.importing": "Curve Imported",
    "posttrain.decision.power": "Ranking",
    "posttrain.domain.approvals": "Standing",
    "posttrain.domain.errors": "PosttrainError",
    "posttrain.domain.gates": "GateReport",
    "posttrain.domain.ids": "Name Principal RunId SampleId StageName Tag TokenId Word",
    "posttrain.domain.lifecycle": "ReleaseState",
    "posttrain.domain.manifest": "Manifest",
    "posttrain.domain.policies": "PinnedPolicy",
    "posttrain.domain.records": (
        "Asset AssetStatus AttemptRecord ChannelRecord Deployment Event Look RunNote Quarantine ReleaseEntry "
        "RunRecord Signal StageRecord Token"
    ),
    "posttrain.domain.overrides": "Override Setting",
    "posttrain.domain.sinks": "Rule SinkView",
    "posttrain.drivers.requests": "RunDriver",
    "posttrain.store.erasure": "Erased",
    "posttrain.store.sweeping": "SweptBlobs",
    "posttrain.telemetry.timeline": "StageTimeline",
    "posttrain.trackers.tracking": "TrackerState",
    "posttrain.views.logs": "LogFile",
    "posttrain.views.moves": "Move",
    "posttrain.views.plans": "PlanView",
    "posttrain.views.reporting": "Written",
    "posttrain.views.status": "RunStatus RunSummary",
    "posttrain.views.tracing": "RecordedSample WrittenTrace",
    "posttrain.web.report": "ComparePage RunReport",
    "typing": "Any",
}
_ROOMS = {name: room for room, names in _WHERE.items() for name in names.split()}


class _Names(dict[str, Any]):
    """The names above, each loaded when it is asked for."""

    def __missing__(self, name: str) -> Any:
        if name not in _ROOMS:
            raise KeyError(name)
        self[name] = found = getattr(import_module(_ROOMS[name]), name)
        return found


_NAMES = _Names()


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """What reads and writes values of a type; names that it needs are loaded as they are met."""
    found: TypeAdapter[Any] = TypeAdapter(kind)
    known: dict[str, Any] = {}
    while not found.pydantic_complete:
        try:
            found.rebuild(force=True, _types_namespace=known)
        except PydanticUndefinedAnnotation as error:
            known[str(error.name)] = _NAMES[str(error.name)]
    return found


@functools.cache
def signature(declared: Callable[..., Any]) -> inspect.Signature:
    """A verb's parameters, after `self`, with the types themselves; what it answers is left as it is written."""
    own = inspect.signature(declared)
    hints = _hints(declared, lambda name: name != "return")
    named = [one.replace(annotation=hints[one.name]) for one in own.parameters.values() if one.name != "self"]
    return own.replace(parameters=named)


@functools.cache
def answer(declared: Callable[..., Any]) -> TypeAdapter[Any]:
    """What reads a verb's answer. It loads the rooms of the values in it, which a server need not."""
    return adapter(_hints(declared, lambda name: name == "return")["return"])


def _hints(declared: Callable[..., Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    written = {name: word for name, word in declared.__annotations__.items() if wanted(name)}
    holder = types.SimpleNamespace(__annotations__=written)
    return typing.get_type_hints(holder, vars(import_module(declared.__module__)), _NAMES)
