"""From what was sent to a verb's arguments, and from what it answers to JSON.

Verbs that are asked otherwise over HTTP than in process: their values name the server's own, or they write files.

Pages of the lists that verbs answer with.

What a verb tells while it is carried out: to whoever waits for it, where somebody does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic_core
from pydantic import ValidationError

from posttrain.api.codec import adapter
from posttrain.api.control import OPERATIONS
from posttrain.api.guarding import refuse
from posttrain.api.pages import cursor, place
from posttrain.api.verbs import CURSOR, LIMIT, UNKNOWN_PARAMETER, USUAL, FileRef, RunFile, Verb
from posttrain.domain.errors import CursorError, InputError, PosttrainError, nearest

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import Sweep
    from posttrain.server.uploads import Bundles

ASKED, ANSWER, PROGRESS = "asked", "answer", "progress"
Told = Callable[[str, Any], None]  # kind and value
_TOLD: ContextVar[Told | None] = ContextVar("posttrain_told", default=None)
_OUT = "out"  # where a verb writes, in the folder of its request
_SHOWN = 80  # characters of what was sent
_MOST_NUMBER = 1 << 63  # what a database counts to


def page(
    verb: Verb[..., Any], named: Mapping[str, Any], project: str, ask: Callable[[Mapping[str, Any]], Any]
) -> dict[str, Any]:
    """The things behind a cursor, and the cursor behind them; None: there are no more.

    Args:
        named: the request's parameters.
        ask: the verb, by its parameters.

    Raises:
        CursorError: it is no place in this list.
    """
    limit = int(named.get(LIMIT, USUAL))
    behind = place(named[CURSOR], project, verb, named) if named.get(CURSOR) else None
    if verb.newest is not None:
        more = {"before": behind[0]} if behind else {}
        found = ask({**named, LIMIT: limit + 1, **more})
        keys = [(verb.newest(one),) for one in found[:limit]]
    else:
        found, key = ask(named), verb.key
        assert key is not None, "a list has an order"
        whole = sorted(found.items() if isinstance(found, dict) else found, key=key)
        try:
            rest = [one for one in whole if behind is None or key(one) > behind]
        except TypeError as error:
            raise CursorError("cursor must be the `next` of the page before; ask without one for the first") from error
        keys = [key(one) for one in rest[:limit]]
        found = dict(rest[: limit + 1]) if isinstance(found, dict) else rest
    items = dict(list(found.items())[:limit]) if isinstance(found, dict) else list(found[:limit])
    return {"items": items, "next": cursor(project, verb, named, keys[-1]) if len(found) > limit else None}


@contextmanager
def telling(told: Told) -> Iterator[None]:
    """For the length of the block `tell` reaches this."""
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


def tell(kind: str, value: Any) -> None:
    """Tell it to whoever waits; nobody may."""
    told = _TOLD.get()
    if told is not None:
        told(kind, value)


def driven(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """The server drives every run, so nobody needs to be asked."""
    refuse(control, "detach")
    run = control.run(named["run_id"])
    found = control.driver(run.id)
    if found is None:
        raise InputError(f"run {run.id}: has ended ({run.state}), so there is nothing to drive; posttrain get {run.id}")
    return found


def ask(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """All answers at once; each is told as it comes."""
    how = {name: value for name, value in named.items() if name not in ("model", "prompts")}
    asked = control.ask(named["model"], named["prompts"], **how)
    said = {name: getattr(asked, name) for name in ("name", "digest", "form", "why")}
    tell(ASKED, said)
    answers = []
    for one in asked.answers:
        tell(ANSWER, one)
        answers.append(one)
    return {**said, "answers": answers}


def evaluate(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """Its words may name files that were sent along, which lie beside."""
    how = {name: value for name, value in named.items() if name not in ("model", "suites", "files")}
    return control.evaluate(named["model"], named["suites"], **how)


def report(control: Control, named: Mapping[str, Any], bundles: Bundles | None) -> Any:
    """The files that `write_report` writes."""
    written = control.write_report(named["run_id"])
    paths = [path for path in (written.report, written.curves) if path is not None]
    return {"files": _sent(bundles, ((path.name, path) for path in paths))}


def trace(control: Control, named: Mapping[str, Any], bundles: Bundles | None) -> Any:
    """The files that `write_trace` writes."""
    written = control.write_trace(named["run_id"], named["stage"], Path(_OUT))
    value = replace(written, trace=Path(written.trace.name), page=Path(written.page.name))
    return {"value": value, "files": _sent(bundles, _below(Path(_OUT)))}


def export(control: Control, named: Mapping[str, Any], bundles: Bundles | None) -> Any:
    """The files of a model."""
    done = control.export(named["model"], Path(_OUT), dtype=named["dtype"], progress=lambda name: tell(PROGRESS, name))
    return {"value": replace(done, folder=Path(".")), "files": _sent(bundles, _below(Path(_OUT)), to_viewers=False)}


def compare(control: Control, named: Mapping[str, Any], bundles: Bundles | None) -> Any:
    """The comparison, and its page where one is wanted."""
    page = Path(_OUT, "comparison.html") if named["page"] else None
    if page is not None:
        page.parent.mkdir()
    value = control.compare(named["words"], page)
    return {"value": value, "files": _sent(bundles, ((one.name, one) for one in [page] if one is not None))}


def import_mlflow(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """What the client read of the store."""
    return control.import_mlflow(str(named["folder"]), None, named["name"])


def submit_point(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """The run of one point of a sweep, which is planned again: it is what it was, or another one is refused."""
    sweep = _sweep(control, named)
    for point in sweep.points:
        if (point.place, point.seed) == (named["place"], named["seed"]):
            return control.submit_point(point)
    raise InputError(f"sweep: has no point of place {named['place']} and seed {named['seed']}; plan it again")


def rank(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """The settings of a sweep by what was measured so far."""
    return control.rank(_sweep(control, named), {(place, seed): run for place, seed, run in named["runs"]})


def _sweep(control: Control, named: Mapping[str, Any]) -> Sweep:
    asked = {name: named[name] for name in ("seeds", "metric", "better")}
    return control.plan_sweep(named["path"], named["overrides"], **asked)


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _sent(
    bundles: Bundles | None, files: Iterator[tuple[str, Path]], *, to_viewers: bool = True
) -> dict[str, dict[str, Any]]:
    """Files put into the store, from where whoever asked fetches them by their digests."""
    if bundles is None:
        raise PosttrainError("a verb that writes files was asked of the server itself")
    return {
        name: {"digest": bundles.keep(path, to_viewers=to_viewers), "bytes": path.stat().st_size}
        for name, path in files
    }


SPECIAL: Mapping[str, Callable[[Control, Mapping[str, Any], Bundles | None], Any]] = {
    "ask": ask,
    "compare": compare,
    "detach": driven,
    "evaluate": evaluate,
    "export": export,
    "import_mlflow": import_mlflow,
    "rank": rank,
    "submit_point": submit_point,
    "write_report": report,
    "write_trace": trace,
}


def to_json(value: Any) -> bytes:
    """A verb's answer. Numbers that JSON has not are words: "NaN", "Infinity"."""
    return pydantic_core.to_json(value, inf_nan_mode="strings", fallback=_numbers)


def _numbers(value: Any) -> Any:
    """An array as a list, without a look at numpy, which the server itself does not load."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} has no form as JSON")
    return value.tolist()


def arguments(operation: Verb[..., Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """A verb's arguments, by name and of their types.

    Raises:
        InputError: one is missing, unknown, or of another type.
    """
    known = operation.parameters
    for name in sent:
        if name not in known:
            raise InputError(
                f"{operation.name}: {UNKNOWN_PARAMETER} {name!r}{nearest(name, known)}; remove or rename it"
            )
    found = {}
    for name, one in known.items():
        value = sent.get(name, one.default)
        kinds = adapter(one.annotation)
        if value is inspect.Parameter.empty:
            value = None
            if not _takes_none(kinds):
                raise InputError(f"{operation.name}: {name} is required; add it")
        try:
            found[name] = checked = kinds.validate_python(value)
            if isinstance(checked, int) and not -_MOST_NUMBER <= checked < _MOST_NUMBER:
                raise InputError(f"{operation.name}: {name} must fit 64 bits, got a larger number")
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in (name, *first["loc"]))
            shown = "" if isinstance(first["input"], dict | list) else f", got {str(first['input'])[:_SHOWN]!r}"
            raise InputError(f"{operation.name}: {place}: {first['msg']}{shown}") from error
    return found


def call(
    control: Control, verb: str, named: Mapping[str, Any], bundles: Bundles | None = None, project: str = ""
) -> Any:
    """Ask a verb with the arguments that `arguments` gave; of a list a page.

    Args:
        bundles: where files that were sent are laid down; None: the verb takes none.
        project: whose cursors are known.
    """
    if OPERATIONS[verb].paged:
        return page(OPERATIONS[verb], named, project, lambda asked: _call(control, verb, asked, bundles))
    return _call(control, verb, named, bundles)


def _call(control: Control, verb: str, named: Mapping[str, Any], bundles: Bundles | None) -> Any:
    with bundles.opened() if bundles else nullcontext():
        if verb in SPECIAL:
            return SPECIAL[verb](control, {name: _laid_down(value, bundles) for name, value in named.items()}, bundles)
        positional: list[Any] = []
        options: dict[str, Any] = {}
        for name, one in OPERATIONS[verb].signature.parameters.items():
            if name not in named:
                if name in _CALLBACKS:
                    options[name] = _tell
                continue
            value = _laid_down(named[name], bundles)
            if one.kind is inspect.Parameter.KEYWORD_ONLY:
                options[name] = value
            elif one.kind is inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
            else:
                positional.append(value)
        return getattr(control, verb)(*positional, **options)


_CALLBACKS = ("say", "progress")


def _tell(text: str) -> None:
    tell(PROGRESS, text)


def _laid_down(value: Any, bundles: Bundles | None) -> Any:
    if isinstance(value, list) and value and all(isinstance(one, FileRef) for one in value):
        return [_laid_down(one, bundles) for one in value]
    if isinstance(value, dict) and value and all(isinstance(one, FileRef) for one in value.values()):
        return {name: bundles.lay(one, name) for name, one in value.items()} if bundles else {}
    if not isinstance(value, FileRef | RunFile):
        return value
    if bundles is None:
        raise InputError("this verb takes no files")
    return bundles.lay_down(value)


def _takes_none(kinds: Any) -> bool:
    try:
        kinds.validate_python(None)
    except ValidationError:
        return False
    return True
