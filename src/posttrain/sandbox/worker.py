"""The process in which a reward's or an observer's own code runs: `python -m posttrain.sandbox.worker FD CELL PARENT`.

The worker uses only the standard library, so it starts in tens of milliseconds and has none of the job's data in
memory. It first enters its cell (`sandbox.cell`) and reports this, then runs a loop: read a request from the socket
`FD`, run the function, answer (`sandbox.protocol`). The worker waits only for its parent; the parent waits with a
deadline, after which the parent closes the cell. The cell also closes when the parent dies. The reward's output goes to
stderr, which the job copies into its log up to a limit.
"""

import asyncio
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import linecache
import mmap
import os
import pkgutil
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.domain.rewards import DIALECTS, SignatureError, detect, entry_name
from posttrain.sandbox.cell import CellPlan, enter
from posttrain.sandbox.dialects import BATCHED, SINGLE, Binder, NoRewardError, as_function
from posttrain.sandbox.port import ObserveError, ObserveFunction, awaited
from posttrain.sandbox.protocol import AnswerError, Redactor, Spans, plain, receive_request, send, send_answers

PACKAGES = Path(__file__).resolve().parents[2]  # the folder with the package posttrain


MAX_LINE = 900  # characters of an error
_SECRETS: dict[str, str] = {}  # variable → value, read before the reward's code runs


class ReportedError(Exception):
    """An error to report to the job: `kind` is load, raised or answer; the text is one line."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


# --- the reward's source ----------------------------------------------------------------------------------------------


def load(path: Path) -> ModuleType:
    """Execute a reward's source file.

    Raises:
        ReportedError: the file cannot be read or parsed, or raises while it is imported.
    """
    sys.path.insert(0, str(path.parent))  # for modules next to the file
    loader = importlib.machinery.SourceFileLoader("posttrain_reward", str(path))  # also loads a file without a suffix
    spec = importlib.util.spec_from_loader(loader.name, loader)
    if spec is None:
        raise ReportedError("load", f"{path.name} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        raise ReportedError("load", f"{path.name}:{error.lineno} is not valid Python: {error.msg}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and error.filename == str(path):
            raise ReportedError("load", f"{path.name} cannot be read: {error}") from error
        raise ReportedError("raised", f"{place(error, path)} raised {one_line(error)} while it was imported") from error
    return module


def try_import(path: Path, entry: str, turns: int = 1) -> None:
    """Execute a dataflow's source.

    A job imports the dataflow outside of a cell, so an `OSError` for files or hosts that are missing here is ignored.

    Args:
        turns: maximum responses of a sample; only with several, a class must have `observe`.

    Raises:
        ReportedError: the module cannot be imported, or lacks the entry, or a class does not fit the turns.
    """
    try:
        module = load(path)
    except ReportedError as error:
        if isinstance(error.__cause__, OSError):
            return
        raise
    if not hasattr(module, entry):
        raise ReportedError("load", f"{path.name} has no {entry!r}")
    made = getattr(module, entry)
    if isinstance(made, type) and (getattr(made, "observe", None) is not None) != (turns > 1):
        there = "an observe method; set turns" if turns == 1 else "no method observe(row, responses); define it"
        raise ReportedError("load", f"{path.name}: {entry} has turns {turns}, but has {there}")


def entry_function(module: ModuleType, path: Path, entry: str | None) -> tuple[Callable[..., Any], str | None]:
    """Return the function of a reward's entry, and its dialect if it is certain (`sandbox.dialects`).

    Without a name, the function is `score`, `compute_score`, or the only public function.

    Raises:
        ReportedError: the function does not exist, or its creation raises.
    """
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    rubrics = [name for name, value in vars(module).items() if hasattr(value, "score_rollout") and not callable(value)]
    try:
        name = entry or entry_name(own, path.name, rubrics, vars(module).keys())
    except InputError as error:
        raise ReportedError("load", str(error)) from error
    if getattr(module, name, None) is None:
        known = ", ".join(own) or "no function"
        raise ReportedError("load", f"{path.name} has no function {name!r}; it defines {known}")
    value = getattr(module, name)
    try:
        return as_function(value, vars(module))
    except NoRewardError as error:
        raise ReportedError("load", f"{path.name}: {entry or 'its entry'}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ReportedError(
            "raised", f"{place(error, path)} raised {one_line(error)} while it was constructed"
        ) from error


def place(error: BaseException, path: Path) -> str:
    """Return `file:line` of the innermost frame in the reward's folder."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).parent == path.parent:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return path.name


def one_line(error: BaseException) -> str:
    """Return `ValueError: text` without line breaks or secrets."""
    return " ".join(_without_secrets(f"{type(error).__name__}: {error}").split())[:300].rstrip(": ")


def _without_secrets(value: Any) -> Any:
    """Return a text, or a map with its nested texts, with secrets redacted; called before texts are cut."""
    if isinstance(value, str):
        return Redactor(_SECRETS).text(value)
    if isinstance(value, Mapping):
        return {_without_secrets(name): _without_secrets(inner) for name, inner in dict(value).items()}
    return value


# --- scoring ----------------------------------------------------------------------------------------------------------


class Scorer:
    """Calls a loaded reward function."""

    def __init__(self, path: Path, entry: str | None, dialect: str | None, marker: mmap.mmap) -> None:
        self.path, self.marker = path, marker
        self.function, spoken = entry_function(load(path), path, entry)
        self.name = getattr(self.function, "__name__", entry or "reward")
        try:
            self.binder = Binder(self.function)
            self.dialect = dialect or spoken or detect(self.binder.signature)
        except (SignatureError, ValueError) as error:  # ValueError: a C function without a signature
            raise ReportedError("load", f"{self.where}: {error}") from error
        if self.dialect not in DIALECTS:
            raise ReportedError("load", f"dialect must be one of {', '.join(DIALECTS)}, got {self.dialect!r}")

    @property
    def where(self) -> str:
        """The line of the function's definition: `file.py:12 (score)`."""
        function = inspect.unwrap(self.function)
        code = getattr(getattr(function, "func", function), "__code__", None)
        line = f":{code.co_firstlineno}" if code else ""
        return f"{self.path.name}{line} ({self.name})"

    def score(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield one answer for every completion of the call, in order, as soon as it is available.

        Raises:
            ReportedError: a batched function raised, or did not return a list of this length; a parameter has no value.
        """
        SEEDS.sow(json.dumps([call[name] for name in ("prompts", "completions", "at")]))
        if self.dialect in BATCHED:
            yield from self._score_together(call)
            return
        for i, (number, text) in enumerate(zip(call["at"], call["completions"], strict=True)):
            self.marker[:] = number.to_bytes(8, "big")
            subject = f"completion {number} {text[:60]!r}"
            try:
                answer = self.checked(self.run(SINGLE[self.dialect](call, i), subject), subject, _spans(call, i))
            except ReportedError as fault:
                if fault.kind == "load":
                    raise
                answer = {"error": str(fault)[:MAX_LINE]}
            yield {"at": number, **answer}

    def _score_together(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        count = len(call["completions"])
        one = f"completion {call['at'][0]} {call['completions'][0][:60]!r}" if count == 1 else ""
        subject = one or f"a batch of {count}"
        scores = self.batch(self.run(BATCHED[self.dialect](call), subject))
        if len(scores) != count:
            raise ReportedError(
                "answer",
                f"{self.where} must return one score per completion ({count}), got {len(scores)}; fix the returned "
                "list",
            )
        for i, number in enumerate(call["at"]):
            try:
                answer = self.checked(
                    scores[i], f"completion {number} {call['completions'][i][:60]!r}", _spans(call, i)
                )
            except ReportedError as fault:
                answer = {"error": str(fault)[:MAX_LINE]}
            yield {"at": number, **answer}

    def run(self, offered: dict[str, Any], subject: str) -> Any:
        """Call the function; await its result if it is asynchronous."""
        try:
            arguments = self.binder.bind(offered)
        except SignatureError as error:
            raise ReportedError("load", f"{self.where}: {error}") from error
        try:
            answer = self.function(**arguments)
            return asyncio.run(awaited(answer)) if inspect.isawaitable(answer) else answer
        except BaseException as error:  # any error: the loop continues with the next completion
            traceback.print_exc()
            raise ReportedError("raised", f"{place(error, self.path)} raised {one_line(error)} on {subject}") from error

    def batch(self, answer: Any) -> list[Any]:
        """Return the list of a batched function's result."""
        if isinstance(answer, Mapping):
            answer = answer.get("rewards", answer.get("scores"))
        if hasattr(answer, "tolist"):
            answer = answer.tolist()
        if not isinstance(answer, (list, tuple)):
            raise ReportedError("answer", f"{self.where} must return a list of scores, got {type(answer).__name__}")
        return list(answer)

    def checked(self, answer: Any, subject: str, spans: Spans) -> dict[str, Any]:
        """Return `plain` of an untrusted answer, whose methods are also the reward's code."""
        try:
            if self.dialect == "verl" and isinstance(answer, (list, tuple)) and answer:
                answer = answer[0]  # as in verl, whose log gets the rest
            return plain(_without_secrets(answer) if _SECRETS else answer, subject, spans)
        except AnswerError as error:
            raise ReportedError("answer", f"{self.where} must return {error}") from error
        except Exception as error:
            raise ReportedError(
                "answer", f"{self.where} must return a score for {subject}: {one_line(error)}"
            ) from error


def _spans(call: Mapping[str, Any], index: int) -> Spans:
    """Return the token spans of a completion's turns; without token ids, nothing: one turn of unknown length."""
    told, ids = call.get("turn_spans"), call.get("completion_ids")
    if told is not None:
        found: Spans = told[index]
        return found
    return () if ids is None else [[0, len(ids[index])]]


class Calls:
    """Calls of an `observe`, up to `concurrency` of them at a time, each in a thread.

    A single call at a time runs in the main thread, for libraries that need the main thread, with seeded generators.

    Args:
        channel: receives the answers, in the order in which they become available.
        observe: the user's function.
    """

    def __init__(self, channel: socket.socket, observe: ObserveFunction, concurrency: int) -> None:
        self.where = observe.where
        self._channel, self._observe, self._sending, self._own = channel, observe, threading.Lock(), os.getpid()
        self._threads = ThreadPoolExecutor(concurrency, "observe") if concurrency > 1 else None

    @classmethod
    def built(cls, channel: socket.socket, source: str, request: Mapping[str, Any]) -> "Calls":
        """Build the observer that a request describes.

        Raises:
            ReportedError: the user's code cannot be imported, or raises.
        """
        sys.path.insert(0, source)
        try:
            observe = pkgutil.resolve_name(request["build"])(Path(source), **request["given"])
            return cls(channel, ObserveFunction(observe), request["concurrency"])
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            said = str(error) if isinstance(error, InputError) else f"{one_line(error)} while it was constructed"
            raise ReportedError("load", said[:MAX_LINE]) from error

    def begin(self, request: Mapping[str, Any]) -> None:
        """Begin the call of a request."""
        if self._threads:
            self._threads.submit(self._run, request)
            return
        SEEDS.sow(json.dumps([request["row"], request["responses"]]))
        self._run(request)

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message; in a process that the user's code forked, exit instead."""
        _leave_forks(self._own)
        with self._sending:
            send(self._channel, message)

    def _run(self, request: Mapping[str, Any]) -> None:
        try:
            answer = {"seen": self._observe(request["row"], request["responses"])}
        except ObserveError as error:
            with suppress(Exception):  # the user's code may have closed the output
                traceback.print_exception(error.__cause__)
            answer = {"unseen": str(error)[:MAX_LINE]}
        self.say({"id": request["id"], **answer})


class Seeds(importlib.abc.MetaPathFinder):
    """Seeds the global generators, including those of a numpy that is imported during a call."""

    def __init__(self) -> None:
        self.now = 0

    def sow(self, scored: str) -> None:
        """Seed the generators from the scored text, so that a resumed run draws the same numbers."""
        self.now = int.from_bytes(hashlib.sha256(scored.encode(errors="surrogatepass")).digest()[:4], "big")
        random.seed(self.now)
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        if numpy is not None:
            numpy.seed(self.now)
        if torch is not None:
            torch.manual_seed(self.now)

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Intercept the import of numpy's generators, to seed them."""
        if name != "numpy.random":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def seeded(module: ModuleType) -> None:
                execute(module)
                module.seed(self.now)

            spec.loader.exec_module = seeded  # type: ignore[method-assign]
        return spec


SEEDS = Seeds()


def serve(channel: socket.socket, marker: mmap.mmap, source: str) -> None:
    """Answer requests until the parent closes the socket.

    Args:
        marker: shared bytes with the number of the completion being scored.
        source: the folder with the reward's file.
    """
    scorer: Scorer | None = None
    calls: Calls | None = None
    own = os.getpid()
    while True:
        try:
            request = receive_request(channel)
        except EOFError:
            return
        linecache.checkcache()
        try:
            if calls and request["op"] == "ping":
                calls.say({"id": request["id"], "end": True})
                continue
            if calls:
                calls.begin(request)
                continue
            if request["op"] == "observer":
                calls = Calls.built(channel, source, request)
                answers: Iterator[dict[str, Any]] = iter([{"dialect": "", "where": calls.where}])
            elif request["op"] == "open":
                scorer = Scorer(Path(source, request["file"]), request["entry"], request["dialect"], marker)
                answers = iter([{"dialect": scorer.dialect, "where": scorer.where}])
            elif request["op"] == "program":
                run_program(channel, request, source)
                continue
            elif request["op"] == "import":
                try_import(Path(source, request["file"]), request["entry"], request["turns"])
                answers = iter([{"dialect": "", "where": ""}])
            elif scorer is None:
                raise ReportedError("load", "no reward is open")
            else:
                answers = _own(scorer.score(request), own)
            if request["op"] in ("open", "import", "observer"):
                send(channel, {"id": request["id"], **next(answers)})
            else:
                send_answers(channel, request["id"], answers)
                send(channel, {"id": request["id"], "end": True})
        except ReportedError as fault:
            _leave_forks(own)
            send(channel, {"id": request["id"], "fault": fault.kind, "message": str(fault)[:MAX_LINE]})
        except MemoryError:
            _leave_forks(own)
            message = "the reward ran out of the memory it may use (MemoryError)"
            send(channel, {"id": request["id"], "fault": "memory", "message": message})


def run_program(channel: socket.socket, request: Mapping[str, Any], source: str) -> None:
    """Run another program to its end; send its exit code, and a tar file of what it left in `out` if it succeeded.

    Args:
        request: `words`, the command, and `variables`; in them, `{home}` is the working folder and `{source}` that of
            the given files. `folder`, below the source, in which it begins. `linked`, name in the working folder → a
            read-only folder, whose files become links in a writable folder of this name.

    Raises:
        ReportedError: the program cannot be started, or the scratch folder is full.
    """
    places = {"{home}": os.getcwd(), "{source}": source}

    def placed(word: str) -> str:
        for name, path in places.items():
            word = word.replace(name, path)
        return word

    try:
        for name, folder in request["linked"].items():
            shutil.copytree(folder, name, copy_function=os.symlink)
        os.makedirs("out")
        environment = {**os.environ, **{name: placed(value) for name, value in request["variables"].items()}}
        words, folder = [placed(word) for word in request["words"]], os.path.join(source, request["folder"])
        done = subprocess.run(words, env=environment, cwd=folder, stdin=subprocess.DEVNULL, check=False)
        with tempfile.TemporaryFile(dir=".") as packed:
            if not done.returncode:
                with tarfile.open(fileobj=packed, mode="w") as archive:
                    archive.add("out", filter=lambda one: one if one.isreg() or one.isdir() else None)
                packed.seek(0)
            send(channel, {"id": request["id"], "code": done.returncode})
            socket.send_fds(channel, [b"P"], [packed.fileno()])
    except (OSError, shutil.Error) as error:
        raise ReportedError("raised", one_line(error)) from error


def _own(answers: Iterator[dict[str, Any]], own: int) -> Iterator[dict[str, Any]]:
    """Yield the answers, in this process only."""
    for answer in answers:
        _leave_forks(own)
        yield answer
    _leave_forks(own)


def _leave_forks(own: int) -> None:
    """Exit if this is a process that the reward forked, which must not answer."""
    if os.getpid() != own:
        os._exit(0)


def main() -> None:
    """Entry point. Arguments: descriptors of socket and marker, a `CellPlan` as JSON, the parent's process id,
    names of secrets."""
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed worker loses no printed line
    descriptor, shared, cell, parent, *secrets = sys.argv[1:]
    _SECRETS.update((name, os.environ[name]) for name in secrets)
    marker = mmap.mmap(int(shared), 8)
    sys.meta_path.insert(0, SEEDS)
    os.close(int(shared))
    found = enter(int(parent), CellPlan(**json.loads(cell)))  # the scratch folder becomes home and working folder
    os.environ.update({"HOME": found.home, "TMPDIR": found.home})
    os.chdir(found.home)
    channel = socket.socket(fileno=int(descriptor))
    send(channel, {"id": 0, "notes": list(found.notes), "whole": found.whole})
    if found.listeners:
        socket.send_fds(channel, [b"L"], [listener.fileno() for listener in found.listeners])
        for listener in found.listeners:
            listener.close()  # only the job accepts connections
    serve(channel, marker, found.source)


if __name__ == "__main__":
    main()
