"""`RemoteControl`: `Control` over HTTP. What is not written out here is one request by the table of operations."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posttrain.api.codec import answer, signature
from posttrain.api.operations import OPERATIONS, PREFIX, RUN_FILES, FileRef, Operation
from posttrain.client.blobs import Sender
from posttrain.client.bundling import Bundle
from posttrain.client.transport import Transport, in_path
from posttrain.client.waiting import RemoteLog, RemoteVigil, RemoteWatcher
from posttrain.domain.errors import DeadlineError, InputError, PosttrainError, unwritable
from posttrain.domain.lifecycle import is_final

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import Comparison, Locked, RunStatus, Scores, TrackerState, Written
    from posttrain.domain.overrides import Setting
    from posttrain.domain.records import RunRecord

_EVERY, _DRAW = 0.5, 0.1  # seconds between two looks at a run, and between two calls of whoever draws it
_NOT_YET = "is not answered by a server yet; ask it where the workspace is"


class RemoteControl:
    """Verbs as requests to one project of a server."""

    def __init__(self, transport: Transport, project: str) -> None:
        self._transport, self._project = transport, project
        self._sender = Sender(transport, project)

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)
        operation = OPERATIONS.get(verb)
        if operation is None:
            raise InputError(f"{verb.replace('_', ' ')} {_NOT_YET}")
        return self._asking(operation)

    def _asking(self, operation: Operation) -> Callable[..., Any]:
        takes = signature(operation.verb)

        def ask(*words: Any, **options: Any) -> Any:
            bound = takes.bind(*words, **options)
            bound.apply_defaults()
            body = self._body(operation, self._sent(operation, bound.arguments))
            return answer(operation.verb).validate_json(body)

        return ask

    def _sent(self, operation: Operation, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as they are sent: files are uploaded, what is called back stays here."""
        setting = given.get("setting", ())
        found = {}
        for name in operation.parameters:
            value = given[name]
            if isinstance(value, Path):
                run_file = operation.verb in RUN_FILES
                value = Bundle(self._sender).of(value, setting) if run_file else self._sender.send(value)
            elif isinstance(value, tuple) and any(isinstance(one, Path) for one in value):
                value = [self._sender.send(one) for one in value]
            found[name] = value
        if operation.verb in RUN_FILES and "setting" in found:
            found["setting"] = ()  # written into the file
        return found

    def _body(self, operation: Operation, named: Mapping[str, Any]) -> bytes:
        path = in_path(operation.whole_path, {"project": self._project, **{n: named[n] for n in operation.in_path}})
        rest = {name: value for name, value in named.items() if name not in operation.in_path}
        if operation.method in ("GET", "DELETE"):
            return self._transport.ask(operation.method, path, rest).body
        plain = {name: _plain(value) for name, value in rest.items()}
        return self._transport.ask(operation.method, path, body=plain).body

    # --- verbs that are more than one request, or none ----------------------------------------------------------------

    def lock(self, path: Path, *, seed: int | None = None, setting: Setting = ()) -> Locked:
        """See `Submissions.lock`."""
        from posttrain.preflight.locks import lock_path

        found: Locked = self._asking(OPERATIONS["lock"])(path, seed=seed, setting=setting)
        return replace(found, place=lock_path(path))

    def drive(
        self,
        run_id: str,
        *,
        timeout: float | None = None,
        watch: Callable[[RunRecord], None] | None = None,
        report: bool = False,
    ) -> RunRecord:
        """See `Submissions.drive`: the server drives it; this waits."""
        until = None if timeout is None else time.monotonic() + timeout
        control = cast("Control", self)
        run = control.run(run_id)
        looked = time.monotonic()
        while True:
            if watch:
                watch(run)
            if is_final("run", run.state):
                return run
            if until is not None and time.monotonic() >= until:
                raise DeadlineError(
                    f"run {run_id}: still {run.state} after {timeout:g} s; wait again or look: posttrain why {run_id}"
                )
            time.sleep(_DRAW)
            if time.monotonic() - looked >= _EVERY:
                run, looked = control.run(run_id), time.monotonic()

    def watcher(self, run_id: str) -> RemoteWatcher:
        """See `Runs.watcher`."""
        return RemoteWatcher(self._transport, self._project, run_id)

    def vigil(self, run_id: str, say: Callable[[str], None], timeout: float | None) -> RemoteVigil:
        """See `Runs.vigil`."""
        return RemoteVigil(lambda: cast("Control", self).run(run_id), timeout)

    def logs(self, run_id: str, stage: str | None, follow: Any = None) -> Iterator[tuple[Any, str]]:
        """See `Runs.logs`."""
        path = in_path(PREFIX + "/runs/{run_id}/logs", {"project": self._project, "run_id": run_id})
        query = {"stage": stage, "follow": follow is not None}
        for kind, data in self._transport.stream(path, query):
            if kind == "log":
                said = json.loads(data)
                yield RemoteLog(said["run_id"], said["stage"], said["attempt"]), said["text"]

    def outcome(self, status: RunStatus) -> PosttrainError | None:
        """See `Runs.outcome`."""
        from posttrain.control.explain import outcome_error

        return outcome_error(status.run, tuple(stage.record for stage in status.stages))

    def scores(self, status: RunStatus) -> Scores:
        """See `Runs.scores`."""
        operation = OPERATIONS["scores"]
        body = self._body(operation, {"run_id": status.run.id})
        found: Scores = answer("scores").validate_json(body)
        return found

    def compare(self, words: Any, page: Path | None = None) -> Comparison:
        """See `Runs.compare`."""
        raise InputError(f"compare {_NOT_YET}")

    def trackers(self, run_id: str, wait: float = 0.0) -> list[TrackerState]:
        """See `Runs.trackers`."""
        until = time.monotonic() + wait
        while True:
            body = self._body(OPERATIONS["trackers"], {"run_id": run_id})
            found: list[TrackerState] = answer("trackers").validate_json(body)
            if not any(one.under_way for one in found) or time.monotonic() >= until:
                return found
            time.sleep(_EVERY)

    def write_report(self, run_id: str) -> Written:
        """See `Runs.write_report`: into this user's cache."""
        from posttrain.views.reporting import Written

        path = in_path(PREFIX + "/runs/{run_id}/report", {"project": self._project, "run_id": run_id})
        files = json.loads(self._transport.ask("GET", path).body)["files"]
        folder = _cache() / "reports" / run_id
        made = {name: _write(folder / Path(name).name, base64.b64decode(data)) for name, data in files.items()}
        return Written(made["report.html"], made.get("curves.png"))

    def close(self) -> None:
        """See `Control.close`."""
        self._transport.close()


def remote_control(url: str, token: str, project: str) -> Control:
    """`Control` over a server."""
    return cast("Control", RemoteControl(Transport(url, token), project))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, FileRef):
        return {"name": value.name, "digest": value.digest, "form": value.form}
    if hasattr(value, "files") and hasattr(value, "text"):
        return {"name": value.name, "text": value.text, "files": {n: _plain(one) for n, one in value.files.items()}}
    return value


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "posttrain"


def _write(path: Path, data: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


__all__ = ["RemoteControl", "remote_control"]
