"""Verbs that are asked otherwise over HTTP than in process: their values name the server's own, or they write files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.guarding import refuse
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.server.telling import ANSWER, ASKED, PROGRESS, tell

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import Sweep
    from posttrain.server.bundles import Bundles

_OUT = "out"  # where a verb writes, in the folder of its request


def scores(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """Of a run by its id."""
    return control.scores(control.status(named["run_id"]))


def driven(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """The server drives every run, so nobody needs to be asked."""
    refuse(control, "detach")
    return control.driver(named["run_id"])


def curves(control: Control, named: Mapping[str, Any], _: Bundles | None) -> Any:
    """Of a history by its ref."""
    return control.curves(control.asset(named["ref"]))


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
    "curves": curves,
    "detach": driven,
    "evaluate": evaluate,
    "export": export,
    "import_mlflow": import_mlflow,
    "rank": rank,
    "scores": scores,
    "submit_point": submit_point,
    "write_report": report,
    "write_trace": trace,
}
