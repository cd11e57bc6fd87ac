"""Parts of pages that a worker renders, because they load numpy, read files of jobs, or judge gates."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from posttrain.api.control import Control
from posttrain.control.lineage import Node
from posttrain.domain.errors import NotFoundError
from posttrain.domain.kinds import OWN
from posttrain.web.pages import template
from posttrain.web.report import render_compare_page, render_run_report

_LINES = 400  # maximum number of lines of each attempt's log
_DATA = ("dataset", "model", "reward", "history", "import", "blob")  # kinds of nodes from which a model was made
_EVIDENCE = ("gate", "policy", "evaluation")
_MEASURING = frozenset(name for name, kind in OWN.items() if kind.measures)
_USES = 500  # maximum number of nodes downstream of a model, nearest first


def drawn(control: Control, sent: Mapping[str, Any]) -> str:
    """Return a part of a page, as HTML.

    Raises:
        NotFoundError: there is no such part.
    """
    words = dict(sent)
    draw = _PARTS.get(words.pop("page"))
    if draw is None:
        raise NotFoundError("the console has no page of this name; reload the page")
    return draw(control, **words)


def _card(control: Control, run_id: str) -> str:
    """Render the summary of a run for an approver: regressions, verdicts, scores."""
    found = control.why(run_id)
    gates = found.report.verdicts if found.report else ()
    shown = template("console/_card.html")
    return shown.render(regressions=found.scores.regressions, gates=gates, scores=found.scores.rows)


def _audit(control: Control, of: str) -> str:
    """Render three facts about a model: the data that made it, its releases with their approvals, and the evidence.

    The lineage contains the approvals of releases and the numbers of gates. The nodes downstream of the model's bytes
    add the model's releases to other channels and its measurements in other runs.
    """
    root = control.lineage(of)
    nodes = _by_kind(root.walk())
    model = next((one for one in nodes["model"] if one.digest), None)
    if model is None:
        return template("console/_audit.html").render(of=of, model=None, root=root)
    found = control.downstream(str(model.digest), _USES)
    uses = _by_kind(found.tree.children)
    known = {(one.name, dict(one.details).get("release")) for one in nodes["release"]}
    measured = {one.name for one in nodes["evaluation"]}
    made = _by_kind(one for one in model.walk() if one is not model)
    shown = {
        "decided": nodes["release"]
        + [one for one in uses["release"] if (one.name, dict(one.details).get("release")) not in known],
        "evidence": [one for kind in _EVIDENCE for one in nodes[kind]]
        + [one for one in uses["stage"] if dict(one.details).get("kind") in _MEASURING and one.name not in measured],
        "data": [one for kind in _DATA for one in made[kind]],
        "manifests": nodes["manifest"],
    }
    # a node may occur below several other nodes, but is listed once
    each = {
        name: list({(one.kind, one.name, one.digest, one.details): one for one in listed}.values())
        for name, listed in shown.items()
    }
    return template("console/_audit.html").render(of=of, model=model, root=root, left_off=found.left_off, **each)


def _by_kind(nodes: Iterable[Node]) -> defaultdict[str, list[Node]]:
    found = defaultdict[str, list[Node]](list)
    for one in nodes:
        found[one.kind].append(one)
    return found


def _log(control: Control, run_id: str) -> str:
    """Render the last lines of output of each attempt."""
    found: dict[tuple[str, int], deque[str]] = {}
    for log, text in control.logs(run_id, None):
        lines = found.setdefault((log.stage, log.attempt), deque(maxlen=_LINES))
        lines.extend(((lines.pop() if lines else "") + text).split("\n"))
    parts = [(stage, attempt, "\n".join(lines)) for (stage, attempt), lines in found.items()]
    return template("console/_log.html").render(parts=parts, most=_LINES)


_PARTS: Mapping[str, Callable[..., str]] = {
    "report": lambda control, run_id, stages: render_run_report(control.report(run_id), "_run.html", stages=stages),
    "compare": lambda control, words: render_compare_page(control.comparison(words), "_compare.html"),
    "card": _card,
    "audit": _audit,
    "log": _log,
}
