"""Verbs over HTTP, and a client's waits for a server.

A verb without its own method in this module is one request, which is built from the verb's declaration. A client waits
for an operation that takes a server longer than a connection lasts, and for a run that a server drives.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from posttrain.api.codec import adapter, raised
from posttrain.api.control import Control
from posttrain.api.values import Answer, Asked
from posttrain.api.verbs import CURSOR, FILES, LIMIT, PREFIX, FileRef, R, RunFile, Verb
from posttrain.client.blobs import Bundle, Fetcher, Sender, refuse_full
from posttrain.client.transport import Transport, in_path
from posttrain.domain.errors import ApiVersionError, DeadlineError, InfrastructureError, NotFoundError
from posttrain.domain.ids import lock_path
from posttrain.domain.lifecycle import is_final
from posttrain.domain.overrides import Override, Setting
from posttrain.store.trees import beside_model, is_byproduct, tree_digest

if TYPE_CHECKING:
    from posttrain.api.values import (
        Imported,
        Point,
        Ranked,
        RunStatus,
        Submitted,
        Sweep,
    )
    from posttrain.domain.records import RunRecord

_PREFER = "respond-async, wait=10"
_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds between two polls; the last number repeats
_TELL = 5.0  # seconds between two progress lines for a person
_MOST_SECONDS = 22200.0  # the longest wait for an operation, longer than a server's limit
_RESENDS = 20  # maximum number of times that a request is sent again after its server ended
_EVERY = 0.5  # seconds between two requests
_OF_FOLDERS = {"add_model": beside_model}  # verb → test for files in a folder that are not sent
_PAGE = 200  # items per page
_DRAW = 0.1  # seconds between two calls of `watch`


def carried_out(transport: Transport, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
    """Return the response to a request that may take long.

    If the server ends, the request is sent again with the same key, so the request is carried out once. An interrupt of
    the wait cancels the request.

    Raises:
        PosttrainError: the server responded with a problem, which is raised.
        InfrastructureError: the server ended repeatedly.
        DeadlineError: the request takes longer than a server allows.
    """
    headers = {"prefer": _PREFER, "idempotency-key": secrets.token_hex(16)}
    for _ in range(_RESENDS):
        reply = transport.ask(method, path, body=body, headers=headers)
        if reply.status != http.client.ACCEPTED:
            return reply.body
        try:
            return _awaited(transport, reply.headers["location"], json.loads(reply.body))
        except NotFoundError:  # the operation was lost with the server; the next server has the key
            continue
        except KeyboardInterrupt:
            transport.ask("DELETE", reply.headers["location"])
            raise
    raise InfrastructureError(
        f"server {transport.url}: ended {_RESENDS} times while it processed this request; read the server's log, "
        "then try again"
    )


def _awaited(transport: Transport, place: str, said: dict[str, Any]) -> bytes:
    looks, told = 0, time.monotonic()
    until = told + _MOST_SECONDS
    while said["state"] == "running":
        if time.monotonic() > until:
            words = said["verb"].replace("_", " ")
            raise DeadlineError(
                f"{words}: still under way after {_MOST_SECONDS:g} s; check the result before you repeat the command"
            )
        time.sleep(_PAUSES[min(looks, len(_PAUSES) - 1)])
        looks += 1
        said = json.loads(transport.ask("GET", place).body)
        if time.monotonic() - told >= _TELL and said["state"] == "running":
            told = time.monotonic()
            words = f": {said['progress']}" if said.get("progress") else ""
            print(f"{said['verb'].replace('_', ' ')}: {said['seconds']:.0f} s{words}", file=sys.stderr)
    if "problem" in said:
        raise raised(said["problem"])
    return json.dumps(said["answer"]).encode()


@dataclass(frozen=True, slots=True)
class RemoteLog:
    """The log of one attempt."""

    run_id: str
    stage: str
    attempt: int
    path: Path | None = None  # the file is on another machine


class RemoteWatcher:
    """Reads one run repeatedly; sends at most two requests a second."""

    def __init__(self, transport: Transport, project: str, run_id: str) -> None:
        self._transport = transport
        self._path = in_path(Control.status.whole_path, {"project": project, "run_id": run_id})
        self._kinds: Any = Control.status.answer
        self._last: tuple[float, str, RunStatus] | None = None

    def read(self) -> RunStatus:
        """Return the run's status, at most half a second old."""
        now = time.monotonic()
        if self._last is not None and (now - self._last[0] < _EVERY or is_final("run", self._last[2].run.state)):
            return self._last[2]
        headers = {"if-none-match": self._last[1]} if self._last else {}
        reply = self._transport.ask("GET", self._path, headers=headers)
        found: RunStatus = self._last[2] if self._last and not reply.body else self._kinds.validate_json(reply.body)
        self._last = now, reply.headers.get("etag", ""), found
        return found


class RemoteRunWatch:
    """Waits for a run; sends at most two requests a second."""

    def __init__(self, look: Callable[[], RunRecord], timeout: float | None) -> None:
        self._look, self._timeout, self._began = look, timeout, time.monotonic()
        self._known: tuple[float, RunRecord] | None = None

    def look(self) -> RunRecord:
        """Return the run's record, at most half a second old. Raises DeadlineError after the time-out."""
        now = time.monotonic()
        if self._known is None or now - self._known[0] >= _EVERY:
            self._known = now, self._look()
        run = self._known[1]
        if self._timeout is not None and now - self._began >= self._timeout and not is_final("run", run.state):
            raise DeadlineError(
                f"run {run.id}: still {run.state} after {self._timeout:g} s; posttrain why {run.id} shows the cause"
            )
        return run

    def rest(self, seconds: float) -> None:
        """Wait until the next look."""
        time.sleep(seconds)


class Remote:
    """Carries out verbs as requests to one project of a server."""

    def __init__(self, transport: Transport, project: str) -> None:
        self._transport, self._project = transport, project
        self._sender, self._fetcher = Sender(transport, project), Fetcher(transport, project)
        self._sweep: dict[str, Any] = {}  # the sweep that was sent last

    def ask(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        verb.given(words, options)
        own = getattr(self, f"_{verb.name}", None)  # a verb that needs several requests or no request
        return own(*words, **options) if own else self._asked(verb, *words, **options)

    def close(self) -> None:
        self._transport.close()

    def _asked(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        given = verb.signature.bind(*words, **options)
        given.apply_defaults()
        sent = self._sent(verb, given.arguments)
        if verb.paged:
            return self._pages(verb, sent, given.arguments.get(LIMIT))
        if verb.streams:
            return self._streamed(verb, sent)
        body = self._body(verb, sent)
        return self._fetched(verb, given.arguments, json.loads(body)) if verb.writes else self._read(verb, body)

    def _sent(self, operation: Verb[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to send, after uploading files; callbacks are omitted."""
        setting = given.get("setting", ())
        found = {}
        for name, one in operation.parameters.items():
            value = given.get(name, one.default)
            if value is one.default or (value == one.default and type(value) is type(one.default)):
                continue  # omitted, so an older server without the parameter accepts the request
            if name == operation.writes:
                value = value is not None
            elif isinstance(value, Path):
                run_file = operation.run_file
                value = (
                    Bundle(self._sender).of(value, setting)
                    if run_file
                    else self._sender.send(value, _OF_FOLDERS.get(operation.name, is_byproduct))
                )
            elif isinstance(value, tuple) and any(isinstance(one, Path) for one in value):
                value = [self._sender.send(one) for one in value]
            found[name] = value
        if operation.run_file and "setting" in found:
            found["setting"] = ()  # the settings are already written into the file
        if operation.along:
            bundle = Bundle(self._sender)
            found |= {name: _sent_along(bundle, kind, found.get(name)) for name, kind in operation.along.items()}
            found[FILES] = bundle.files
        return found

    def _fetched(self, verb: Verb[..., Any], given: Mapping[str, Any], said: Mapping[str, Any]) -> Any:
        """Return the result of a verb that writes files, after fetching the files from the server."""
        files, target = said["files"], given[verb.writes]
        found = self._read(verb, json.dumps(said["value"]).encode())
        if verb.file:
            if target is not None:
                self._fetcher.fetch({target.name: files[verb.file]}, target.parent)
            return found
        self._fetcher.fetch(files, target, given.get("progress", lambda _: None))
        paths = {one.name: getattr(found, one.name) for one in fields(found)}
        inside = {name: target / path.name for name, path in paths.items() if isinstance(path, Path)}
        return replace(found, **inside)

    def _streamed(self, verb: Verb[..., Any], sent: Mapping[str, Any]) -> Any:
        """Return a result whose items arrive one by one."""
        path = in_path(verb.whole_path, {"project": self._project})
        events = self._transport.stream(path, body=_plain(sent))
        kind, first = next(events)
        said = json.loads(first) if kind == "asked" else {}
        known = {name: str(said.get(name, "")) for name in ("name", "digest", "form", "why")}
        kinds = adapter(Answer | str)
        return Asked(**known, answers=(kinds.validate_json(data) for kind, data in events if kind == "answer"))

    def _pages(self, operation: Verb[..., Any], sent: Mapping[str, Any], wanted: int | None) -> Any:
        """Request a list page by page; return all its items or the first `wanted` items."""
        found: list[Any] = []
        behind: str | None = None
        while True:
            left = _PAGE if wanted is None else min(_PAGE, wanted - len(found))
            if left <= 0:
                return found
            said = json.loads(self._body(operation, {**sent, LIMIT: left, CURSOR: behind}))
            said = said if isinstance(said, dict) else {}
            items = self._read(operation, json.dumps(said.get("items")).encode())
            behind = said.get("next")
            if isinstance(items, dict):
                found += items.items()
            else:
                found += items
            if behind is None:
                return dict(found) if isinstance(items, dict) else found

    def _read(self, verb: Verb[..., R], body: bytes) -> R:
        """Parse the response to a verb's request.

        Raises:
            ApiVersionError: the response is from another version of Posttrain and cannot be parsed.
        """
        try:
            found: R = verb.answer.validate_json(body)
            return found
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, (verb.name.replace("_", " "), *first["loc"])))
            raise ApiVersionError(
                f"{place}: the server's response cannot be read: {first['msg']}; {self._transport.skew}"
            ) from error

    def _body(self, operation: Verb[..., Any], named: Mapping[str, Any]) -> bytes:
        """Send a verb's request and return the response.

        Raises:
            NotFoundError: a name cannot be part of a URL path, so the server has no such object.
        """
        for name in operation.in_path:
            if "/" in str(named[name]):
                raise NotFoundError(
                    f"{operation.name.replace('_', ' ')}: {str(named[name])[:120]!r} contains a slash, so no object "
                    "has this name; give the run and the stage as two arguments"
                )
        path = in_path(operation.whole_path, {"project": self._project, **{n: named[n] for n in operation.in_path}})
        rest = {name: value for name, value in named.items() if name not in operation.in_path}
        if operation.method in ("GET", "DELETE"):
            return self._transport.ask(operation.method, path, rest).body
        plain = {name: _plain(value) for name, value in rest.items()}
        if operation.heavy:
            return carried_out(self._transport, operation.method, path, plain)
        return self._transport.ask(operation.method, path, body=plain).body

    # --- verbs that need several requests or none ---------------------------------------------------------------------

    def _lock(self, path: Path, *, seed: int | None = None, setting: Setting = ()) -> Any:
        return replace(self._asked(Control.lock, path, seed=seed, setting=setting), place=lock_path(path))

    def _drive(
        self,
        run_id: str,
        *,
        timeout: float | None = None,
        watch: Callable[[RunRecord], None] | None = None,
        report: bool = False,
    ) -> RunRecord:
        """Wait for the end of a run; the server drives the run."""
        watch_run = RemoteRunWatch(lambda: Control(self).run(run_id), timeout)
        while True:
            run = watch_run.look()
            if watch:
                watch(run)
            if is_final("run", run.state):
                return run
            watch_run.rest(_DRAW)

    def _watcher(self, run_id: str) -> RemoteWatcher:
        return RemoteWatcher(self._transport, self._project, run_id)

    def _watch_run(self, run_id: str, say: Callable[[str], None], timeout: float | None) -> RemoteRunWatch:
        return RemoteRunWatch(lambda: Control(self).run(run_id), timeout)

    def _logs(self, run_id: str, stage: str | None, follow: Any = None) -> Iterator[tuple[Any, str]]:
        path = in_path(PREFIX + "/runs/{run_id}/logs", {"project": self._project, "run_id": run_id})
        query = {"stage": stage, "follow": follow is not None}
        for kind, data in self._transport.stream(path, query):
            if kind == "log":
                said = json.loads(data)
                yield RemoteLog(said["run_id"], said["stage"], said["attempt"]), said["text"]

    def _compare(self, words: Sequence[str], page: Path | None = None) -> Any:
        """Send a comparison, with each model folder of this machine replaced by the digest of its files."""
        named = [_model_digest(word) if word.startswith((".", "~", "/")) else word for word in words]
        return self._asked(Control.compare, named, page)

    def _import_mlflow(self, where: str, run: str | None, name: str | None) -> Imported:
        """Read the MLflow store on this machine, and send a copy of the run to the server."""
        from posttrain.foreign.mlflow_run import read_mlflow
        from posttrain.foreign.outside import carry

        with tempfile.TemporaryDirectory(prefix="posttrain-import-") as folder:
            sent = self._sender.send(carry(read_mlflow(where, run), Path(folder)), follow_links=True)
        body = self._body(Control.import_mlflow, {"folder": replace(sent, name="run"), "name": name})
        return self._read(Control.import_mlflow, body)

    def _write_report(self, run_id: str, folder: Path | None = None) -> Any:
        """Write a run's report into `folder`, or into this user's cache if no folder is given."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "posttrain"
        return self._asked(Control.write_report, run_id, folder or cache / "reports" / run_id)

    def _follow(self, run_id: str) -> None:
        """Do nothing, because the server's driver starts the process that writes trackers."""

    def _export(self, model: str, folder: Path, **how: Any) -> Any:
        refuse_full(folder)
        return self._asked(Control.export, model, folder, **how)

    def _plan_sweep(self, path: Path, *words: Any, **how: Any) -> Sweep:
        self._sweep = self._sent(Control.plan_sweep, Control.plan_sweep.signature.bind(path, *words, **how).arguments)
        return replace(self._read(Control.plan_sweep, self._body(Control.plan_sweep, self._sweep)), source=path)

    def _submit_point(self, point: Point) -> Submitted:
        """Submit a point of the sweep that was planned last."""
        sent = {**self._sweep, "place": point.place, "seed": point.seed}
        return self._read(Control.submit_point, self._body(Control.submit_point, sent))

    def _rank(self, sweep: Sweep, runs: Mapping[tuple[int, int], str]) -> Ranked:
        """Rank the runs of the sweep that was planned last."""
        sent = {**self._sweep, "runs": [[*key, run] for key, run in runs.items()]}
        return self._read(Control.rank, self._body(Control.rank, sent))


def remote_control(url: str, token: str, project: str) -> Control:
    """Return `Control` over a server."""
    return Control(Remote(Transport(url, token), project))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return asdict(value) if isinstance(value, FileRef | RunFile | Override) else value


def _sent_along(bundle: Bundle, kind: str, value: Any) -> Any:
    """Return a name, a list of names, or a reward with its ref, as the server can resolve it; send local files."""
    if isinstance(value, str):
        return bundle.word(kind, value)
    if isinstance(value, Mapping):
        return {**value, "ref": bundle.word(kind, value["ref"])}
    return value and [bundle.word(kind, one) for one in value]


def _model_digest(word: str) -> str:
    """Return the digest of a folder of this machine, after checking that the folder contains a model."""
    from posttrain.data.assets import inspect_model
    from posttrain.data.refs import local_path, parse_ref

    path = local_path(parse_ref(word, "model"), Path.cwd())
    inspect_model(path)
    return tree_digest(path, skip=beside_model)
