"""The pages of the console. Each calls `Control` as the logged-in principal, so it shows only permitted data.

On the page of a chat, people talk to the served models of channels, one or two side by side. The server of the console
passes messages on to the servers of models on this machine, with the key that they recorded in the workspace's folder.
The conversation is in the page's form and is not stored. With the console's script an answer appears as it
arrives, as JSON lines; without it, the form returns the page with the whole answer.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import Request, Response
from starlette.responses import StreamingResponse

from posttrain.client.chats import Message, Talker, running
from posttrain.decision.releases import rollback_target
from posttrain.domain.errors import InputError, NotFoundError, PosttrainError
from posttrain.domain.lifecycle import ReleaseState, is_final
from posttrain.server.console import visits
from posttrain.server.console.visits import HEADERS, Visit, failed, redirect
from posttrain.server.limits import FOLLOW, HEAVY, in_thread
from posttrain.server.operations import Server

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import ChannelView, RunSummary


COMPARED = 6  # maximum number of runs side by side; more do not fit in a window
PAGE = 50  # runs, or moves of a channel, per page
_QUEUE = 200  # maximum number of unfinished runs
_TABLE, _METRICS = 200, 6  # maximum numbers of runs and of metric columns in the table
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq}
_CONDITION = re.compile(r"([^<>=\s]+)(>=|<=|>|<|=)([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
_LINES = "application/x-ndjson"
_LONGEST_CHAT = 48 << 10  # characters of a conversation


def run_list(visit: Visit) -> Response:
    """Show the unfinished runs, and the newest runs that have ended."""
    words = visit.request.query_params
    wanted = words.get("q", "").strip()[:200]
    note = ""
    if wanted:
        try:
            return visit.goes_to(f"/runs/{visit.control.run(wanted).id}")
        except (NotFoundError, InputError) as error:
            note = str(error)
    before, tag = words.get("before") or None, words.get("tag") or None
    newest = visit.control.ls(PAGE, before, tag)
    queue = newest if tag is not None else [] if before else visit.control.queue(_QUEUE)
    ended = [one for one in newest if is_final("run", one.state)]
    return visit.page(
        "runs",
        tag=tag,
        live="" if before or tag else "runs",  # older pages do not change
        groups=(("Waiting", _waiting(queue, True)), ("Running", _waiting(queue, False)), ("Ended", ended)),
        note=note,
        wanted=wanted,
        before=before,
        older=newest[-1].id if len(newest) == PAGE else "",
    )


def run_table(visit: Visit) -> Response:
    """Show the newest runs as a table with a column for each metric, sorted and filtered by the query.

    `sort` is a column name, with the prefix `-` for descending order. `where` contains conditions
    (`heldout/accuracy>=0.9`, `tokens<1e6`) and words that must occur in a run's name, id, owner, state or tags. A run
    without a value in the sorted column comes last. A run without a value in a condition's column does not meet the
    condition.
    """
    words = visit.request.query_params
    where, sort, tag = (
        words.get("where", "").strip()[:200],
        words.get("sort", "-created")[:200],
        words.get("tag") or None,
    )
    found = visit.control.ls(_TABLE, None, tag)
    metrics = [name for name, _ in Counter(name for one in found for name in one.score).most_common(_METRICS)]
    terms = re.sub(r"\s*([<>]=?|=)\s*", r"\1", where).split()
    unread = [one for one in terms if re.search("[<>=]", one) and not _CONDITION.fullmatch(one)]
    tests = [_test(one) for one in terms]
    rows = [one for one in found if all(test(one) for test in tests)]
    column, falls = sort.removeprefix("-"), sort.startswith("-")
    known = [one for one in rows if _value(one, column) is not None]
    known.sort(key=lambda one: _value(one, column), reverse=falls)  # type: ignore[arg-type, return-value]
    rest = [one for one in rows if _value(one, column) is None]
    return visit.page(
        "table", live="" if where or tag else "runs", rows=[*known, *rest], metrics=metrics, where=where, sort=sort,
        tag=tag, of=len(found), full=len(found) == _TABLE, unread=unread,
    )  # fmt: skip


def _value(run: RunSummary, column: str) -> float | str | None:
    """Return a run's value in a column; None if the run has no value."""
    columns: dict[str, float | str] = {
        "name": run.name, "state": run.state, "owner": run.owner, "tokens": float(run.tokens),
        "seconds": run.seconds, "created": run.created_at,
    }  # fmt: skip
    found = columns.get(column, run.score.get(column))
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _test(word: str) -> Callable[[RunSummary], bool]:
    """Return a test for the condition that a word of `where` states."""
    found = _CONDITION.fullmatch(word)
    if found is None:
        text = word.lower()
        return lambda run: any(text in one.lower() for one in (run.name, run.id, run.owner, run.state, *run.tags))
    column, compare, limit = found[1], _OPERATORS[found[2]], float(found[3])

    def holds(run: RunSummary) -> bool:
        value = _value(run, column)
        return isinstance(value, int | float) and compare(value, limit)

    return holds


def _waiting(queue: Sequence[RunSummary], waits: bool) -> list[RunSummary]:
    """Return the unfinished runs in the queue that have no running stage (if `waits`), or those that have one."""
    return [one for one in queue if waits != one.at_work and not is_final("run", one.state)]


def run(visit: Visit) -> Response:
    """Show a run's status. The page then requests the run's report, which a worker renders."""
    status = visit.control.status(visit.named("run"))
    return visit.page("run", live=f"run/{status.run.id}", status_of=status, over=is_final("run", status.run.state))


def report(visit: Visit) -> Response:
    """Show the report of a run: scores, gates, curves, samples, costs and lineage."""
    run_id = visit.control.run(visit.named("run")).id  # an unknown run is rejected before it occupies a worker
    part = "part" in visit.request.query_params  # the report is part of the run's page, which already shows the stages
    drawn = visit.drawn("report", run_id=run_id, stages=not part)
    return visit.page("part" if part else "report", run_id=run_id, drawn=drawn)


def card(visit: Visit) -> Response:
    """Show the summary of a run for an approver; a channel's page requests this summary."""
    return visit.page("part", drawn=visit.drawn("card", run_id=visit.control.run(visit.named("run")).id))


def log(visit: Visit) -> Response:
    """Show the end of the output of a run's jobs."""
    run_id = visit.control.run(visit.named("run")).id
    return visit.page("log", live=f"run/{run_id}", run_id=run_id, drawn=visit.drawn("log", run_id=run_id))


def compare(visit: Visit) -> Response:
    """Show runs side by side."""
    chosen = [one[:200] for one in visit.request.query_params.getlist("runs") if one][:COMPARED]
    if len(chosen) < 2:
        ended = [one for one in visit.control.ls(PAGE) if is_final("run", one.state)]
        scored = [one for one in ended if one.score]
        return visit.page("choose", newest=scored, chosen=chosen, others=len(ended) - len(scored))
    return visit.page("compare", chosen=chosen, drawn=visit.drawn("compare", words=chosen))


def guarded(control: Control) -> list[str]:
    """Return the channels that can have approval requests: those that are protected or have a policy."""
    return [one.name for one in control.channels() if one.protected or one.policy]


def approvals(visit: Visit) -> Response:
    """Show the pending approval requests of all channels, oldest first."""
    asked = [(name, one) for name in guarded(visit.control) for one in visit.control.approval_requests(name)]
    return visit.page("approvals", live="approvals", asked=sorted(asked, key=lambda pair: pair[1].request.at))


def audit(visit: Visit) -> Response:
    """Show the data that made a model, the people who approved it, and the evidence."""
    of = visit.request.query_params.get("of", "").strip()[:200]
    return visit.page("audit", of=of, drawn=visit.drawn("audit", of=of) if of else "", live_ones=visit.control.live())


def channels(visit: Visit) -> Response:
    """Show every channel with its live release."""
    live = {entry.channel: entry for entry in visit.control.live()}
    return visit.page("channels", live="channels", records=visit.control.channels(), entries=live)


def channel(visit: Visit) -> Response:
    """Show a channel's live release, its pending approvals, and its history."""
    found = _channel(visit)
    name = found.record.name
    before = str(_number(visit.request.query_params.get("before", "")) or "") or None
    moves = visit.control.history(name, PAGE, before)
    return visit.page(
        "channel",
        live="" if before else f"channel/{name}",  # older pages do not change
        found=found,
        name=name,
        pinned=visit.control.policy(name),
        asked=visit.control.approval_requests(name),
        moves=moves,
        before=before,
        older=moves[-1].entry.sequence if moves and moves[-1].entry.sequence > 1 else "",
        target=ReleaseState.SUPERSEDED in found.states.values(),
        frozen_why=str(found.frozen.payload.get("why") or "") if found.frozen else "",
    )


def confirm_rollback(visit: Visit) -> Response:
    """Show the release that a rollback would make live."""
    found, to = _channel(visit), visit.request.query_params.get("to", "")
    return _confirmation(visit, found, to)


def roll_back(visit: Visit) -> Response:
    """Roll a channel back, with a reason."""
    found, form = _channel(visit), visit.form
    to, since, reason = form.get("to", ""), form.get("since", ""), form.get("reason", "").strip()
    if not reason:
        trouble = "a rollback needs a reason, which is recorded with the event; enter a reason"
        return _confirmation(visit, found, to, trouble)
    sent = {"channel": found.record.name, "to": to or None, "since": _number(since), "reason": reason}
    sent["lift_quarantine"] = reason if form.get("barred") else ""  # the page showed the quarantine
    visit.worker("rollback", sent)
    return visit.goes_to(f"/channels/{_quoted(found.record.name)}")


def decide(visit: Visit) -> Response:
    """Approve or reject a pending request."""
    found, form = _channel(visit), visit.form
    verdict, request = form.get("verdict", ""), form.get("request", "")
    if verdict not in ("approve", "reject") or not any(
        one.request.digest == request for one in visit.control.approval_requests(found.record.name)
    ):
        raise InputError("this approval is no longer pending; open the page again")
    visit.worker(verdict, {"what": request, "channel": None, "reason": form.get("reason", "").strip()})
    return visit.goes_to("/approvals" if form.get("inbox") else f"/channels/{_quoted(found.record.name)}")


def note(visit: Visit) -> Response:
    """Add a note to a run."""
    run_id, tag = visit.named("run"), visit.form.get("tag", "").strip()
    visit.control.note(run_id, visit.form.get("text", ""), [tag] if tag else [])
    return visit.goes_to(f"/runs/{run_id}")


def stop(visit: Visit) -> Response:
    """Request the stop of a run."""
    return visit.goes_to(f"/runs/{visit.control.stop(visit.named('run')).id}")


def retry(visit: Visit) -> Response:
    """Retry a stopped or failed run."""
    return visit.goes_to(f"/runs/{visit.control.retry(visit.named('run')).id}")


def home(visit: Visit) -> Response:
    """Redirect to the list of runs."""
    return redirect(f"/projects/{visit.project}/runs")


def _channel(visit: Visit) -> ChannelView:
    found = visit.control.channel(visit.named("channel"))
    if not found.record.generation and not found.moves:
        raise NotFoundError("the channel does not exist; the first release or policy creates it")
    return found


def _confirmation(visit: Visit, found: ChannelView, to: str, trouble: str = "") -> Response:
    if found.live is None:
        raise NotFoundError("nothing was released to this channel yet, so there is no earlier release to restore")
    history = [move.entry for move in reversed(visit.control.history(found.record.name))]
    wanted = next((entry for entry in history if to and entry.sequence == _number(to)), None)
    if to and wanted is None:
        raise NotFoundError("the channel has no such release")
    quarantined = [one.model_digest for one in found.quarantine]
    digest = rollback_target(history, found.live, quarantined, wanted.model_digest if wanted else None)
    return visit.page(
        "rollback",
        status=422 if trouble else 200,
        wrong=trouble,
        name=found.record.name,
        live_release=found.live,
        target=next(entry for entry in reversed(history) if entry.model_digest == digest),
        to=to,
        barred=[one for one in found.quarantine if one.model_digest == digest],
    )


def _number(word: str) -> int | None:
    return int(word) if word.isdecimal() and len(word) < 10 else None


def _quoted(name: str) -> str:
    return quote(name, safe="")


def chat(visit: Visit) -> Response:
    """Show an empty conversation with a channel's model, or with two."""
    return _chat(visit, [visit.named("channel"), *_other(visit, visit.request.query_params.get("other", ""))])


def _other(visit: Visit, name: str) -> list[str]:
    return [name] if name and name != visit.named("channel") else []


def _chat(visit: Visit, names: list[str], talks: list[list[Message]] | None = None, wrong: str = "") -> Response:
    known = [one.name for one in visit.control.channels()]
    if odd := next((name for name in names if name not in known), None):
        raise NotFoundError(f"there is no channel {odd[:80]!r}")
    root = visit.server.workspace.root
    served = [name for name in known if running(root, visit.project, name)]
    columns = [(name, talk, json.dumps(talk)) for name, talk in zip(names, talks or [[] for _ in names], strict=True)]
    absent = [name for name in names if name not in served]
    return visit.page("chat", name=names[0], columns=columns, served=served, absent=absent, wrong=wrong)


def _whole_answers(visit: Visit) -> Response:
    """Send a message to the models of the form; show the page with their whole answers."""
    names = [visit.named("channel"), *_other(visit, visit.form.get("other", ""))]
    message, talks = _message(visit), [_history(visit, place) for place in range(len(names))]
    try:
        for name, talk in zip(names, talks, strict=True):
            answer = "".join(_talker(visit, name).answer([*talk, message]))
            talk += [message, {"role": "assistant", "content": answer}]
    except PosttrainError as error:
        return _chat(visit, names, talks, str(error))
    return _chat(visit, names, talks)


def answering(server: Server, enter: Callable[[Server, Request], Visit]) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a message: a stream of JSON lines if the browser asks for them, and a page otherwise."""

    async def answer(request: Request) -> Response:
        visit = None
        try:
            visit = await in_thread(HEAVY, enter, server, request)
            visit = visit.sending(await visits.read_form(request, visit.secret, secure=server.secure))
            principal = visit.asker.identity.principal
            if request.headers.get("accept") != _LINES:
                async with server.limits.taken(principal, HEAVY):
                    return await in_thread(HEAVY, _whole_answers, visit)
            talk = _talker(visit, visit.named("channel"))
            pieces = talk.answer([*_history(visit, 0), _message(visit)])
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(server.limits.taken(principal, FOLLOW))
                held = stack.pop_all()
            return StreamingResponse(_lines(pieces, talk, held), headers=HEADERS, media_type=_LINES)
        except Exception as error:
            return await in_thread(HEAVY, failed, request, error, visit)

    return answer


async def _lines(pieces: Iterator[str], talk: Talker, held: AsyncExitStack) -> AsyncIterator[bytes]:
    def line(**said: str) -> bytes:
        return json.dumps(said).encode() + b"\n"

    async with held:
        try:
            while (piece := await in_thread(FOLLOW, next, pieces, None)) is not None:
                yield line(text=piece)
            yield line(digest=talk.digest)
        except PosttrainError as error:
            yield line(error=str(error))


def _talker(visit: Visit, name: str) -> Talker:
    visit.control.channel(name)  # raises if the visitor may not see it
    found = running(visit.server.workspace.root, visit.project, name)
    if found is None:
        raise InputError(f"channel {name[:80]} is not served on this machine: posttrain serve-model {name[:80]}")
    return found


def _message(visit: Visit) -> Message:
    message = visit.form.get("message", "").strip()
    if not message:
        raise InputError("the message must have text, got none; write one")
    return {"role": "user", "content": message}


def _history(visit: Visit, place: int) -> list[Message]:
    """Return the conversation so far, which the form contains.

    Raises:
        InputError: it is not a conversation, or too long.
    """
    text = visit.form.get(f"history{place}", "") or "[]"
    try:
        found: Any = json.loads(text)
        talk = [{"role": str(one["role"]), "content": str(one["content"])} for one in found]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("the conversation of the form cannot be read; begin a new one") from error
    if odd := next((one["role"] for one in talk if one["role"] not in ("user", "assistant")), None):
        raise InputError(f"a message's role must be user or assistant, got {odd[:40]!r}; begin a new conversation")
    if len(text) > _LONGEST_CHAT:
        raise InputError(
            f"a conversation has at most {_LONGEST_CHAT} characters as JSON, got {len(text)}; begin a new one"
        )
    return talk
