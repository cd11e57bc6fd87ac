"""Models that a job serves to its own programs, and models of its roles on other servers.

A model that the job serves has a separate server (`posttrain.serving`), which ends with the job. The server answers
only callers with the job's key. What they spend counts as the job's: the server computes an answer when the most that
it can spend was granted, and a grant is recorded before the server receives it. So the budget holds also for a program
that asks for too much, and after a kill.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from posttrain.domain.errors import BudgetExceededError, InfrastructureError, InputError, JobFailedError
from posttrain.domain.jobs import Note, tokens_short
from posttrain.domain.roles import SERVED
from posttrain.engine.config import SamplingConfig
from posttrain.engine.config.training import written
from posttrain.engine.roles.remote import AT_FIRST, PATIENCE, RemoteModel, RemoteSource
from posttrain.engine.samples import Prompt
from posttrain.engine.settings import InferenceRuntimeConfig, ServedConfig
from posttrain.execution.processes import without_keys
from posttrain.jobs.entry import Job

LOADING = 3600.0  # seconds within which a model must be loaded
_GRANT = 1 << 16  # tokens beyond those that are needed
_ENDS = 15.0  # seconds in which a server without requests ends
_COMPARED_PROMPTS, _COMPARED = 8, 400  # prompts by which tokenizers are compared; tokens of each, and of the vocabulary


@dataclass(frozen=True, slots=True)
class Reached:
    """How a reward's code reaches a model."""

    url: str
    address: str  # host:port
    model: str  # its name in requests
    key: str = field(default="", repr=False)
    variable: str = ""  # the variable that has the key instead
    served: ServedModel | None = None  # its server, if the job serves it


def open_models(job: Job, models: Mapping[str, ServedConfig], stack: ExitStack) -> dict[str, Reached]:
    """Serve the models of a stage until the stack is closed; return how each is reached.

    A note reports the tokens that they spend; these are not tokens of the stage. Other servers must have their models.

    Raises:
        InputError, JobFailedError, InfrastructureError: see `ServedModel` and `RemoteSource.find`.
    """
    found: dict[str, Reached] = {}
    for name, one in models.items():
        if one.serve is None:
            source = replace(_source(job, f"models.{name}", one), tell=partial(_warn, job), stopping=job.stopping)
            there = source.find(PATIENCE if job.order.resume else AT_FIRST)
            found[name] = Reached(source.url, one.address, there, variable=one.key or "")
            continue
        cache = written(one.runtime.kv_cache)
        slot, context = f"{SERVED}{name}", (f"models.{name}.context", one.context)
        served = ServedModel(job, slot, one.runtime, context, cache, budgeted=False)

        def tell(served: ServedModel = served, slot: str = slot) -> None:
            line = f"{slot}: {job.label(slot)} answered {served.answered} requests with {served.tokens} tokens"
            print(line)
            job.sink(Note(line, time.time()))

        stack.callback(tell)  # after the server has ended
        stack.enter_context(served)
        job.tell_fallbacks(served.facts["fallbacks"])
        found[name] = Reached(f"{served.url}/v1", urlsplit(served.url).netloc, "model", served.key, "", served)
    return found


def open_remote(job: Job, config: SamplingConfig, role: str, given: ServedConfig) -> RemoteModel:
    """Return a role's model on another server, with the key from the job's environment.

    Raises:
        InputError: the environment has no such key; the server does not have the model.
        InfrastructureError: the server does not answer. One that was never reached is given up early.
    """
    source = _source(job, role, given)
    if config.placement.is_inline and config.runtime.ray_address is None:  # workers elsewhere have only the log
        source = replace(source, tell=partial(_warn, job), stopping=job.stopping)
    found = source.open(PATIENCE if job.order.resume else AT_FIRST)
    print(found.about)
    return found


def _source(job: Job, role: str, given: ServedConfig) -> RemoteSource:
    """Return the address of a model, with the key from the job's environment.

    Raises:
        InputError: the environment has no such key, or no request can have it.
    """
    if given.key is not None and given.key not in job.secrets:
        raise InputError(f"{role}.key: the job's environment has no {given.key}; export it where the run is driven")
    return RemoteSource(role, str(given.url), given.model, job.secrets[given.key].strip() if given.key else "")


def _warn(job: Job, line: str) -> None:
    """Report a warning at once; the controller waits for the worker that reports it, so no other thread does."""
    print(line, flush=True)
    job.sink(Note(line, time.time(), "warning"))
    job.flush()


def compare_tokens(model: RemoteModel, tokenizer: PreTrainedTokenizerBase, train: list[Prompt]) -> None:
    """Check that a server has the student's tokenizer, by prompts, special tokens and a share of the vocabulary.

    Raises:
        InputError: it tokenizes one of these texts differently.
    """
    size, most = len(tokenizer), model.context_length
    prompts = [tokenizer.decode(prompt.tokens[:_COMPARED]) for prompt in train[:_COMPARED_PROMPTS]]
    vocabulary = "".join(tokenizer.decode([token]) for token in range(0, size, -(-size // _COMPARED)))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=model.adds_special_tokens))

    for text in (*prompts, " ".join(tokenizer.get_added_vocab()), vocabulary):
        step = len(text) if len(encode(text)) <= most else max(1, (most - 4) // 4)  # a character has at most four bytes
        model.refuse_other_tokens(encode, (text[begin : begin + step] for begin in range(0, len(text), step)))


class ServedModel:
    """A served model, once `with` has started it.

    Args:
        slot: the input of the job with the model.
        context: the field with the maximum tokens of a prompt with its response, and its value; None: the model's.
        kv_cache: maximum bytes of keys and values; None: half of the free memory.
        budgeted: whether its tokens count as the job's.

    Raises:
        InputError, JobFailedError: the model cannot be served.
        InfrastructureError: the server ended, or needed more than an hour to load the model.
    """

    url: str
    facts: Mapping[str, Any]  # of the engine: see `jobs.bodies.serving.serve`

    def __init__(
        self,
        job: Job,
        slot: str,
        runtime: InferenceRuntimeConfig,
        context: tuple[str, int | None],
        kv_cache: int | None,
        *,
        budgeted: bool = True,
    ) -> None:
        self._job, self.key, self._budgeted = job, secrets.token_urlsafe(24), budgeted
        self.tokens = self.answered = self._granted = self._reserved = 0
        self._error: Exception | None = None
        self.refused = ""  # why the server refused the last request that it refused
        self._started = threading.Event()
        environment = {name: value for name, value in without_keys(os.environ).items() if not name.startswith("PYTHON")}
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", "posttrain.serving"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self._limit = job.order.token_allowance if budgeted else None
        granted = None if self._limit is None else 0
        folder, digest = str(job.input(slot)), job.order.inputs[slot].digest
        chosen = runtime.model_dump(mode="json", include={"device", "dtype", "threads"})
        about = {"name": "model", "digest": digest, "key": self.key, "folder": folder, "runtime": chosen}
        self._slot, self._context = slot, context
        settings = {"context": context[1], "kv_cache": kv_cache, "granted": granted, "threads": runtime.threads}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._tell({**about, **settings, "asked_by": os.getpid()})

    def __enter__(self) -> Self:
        self._reader.start()
        try:
            if not self._started.wait(LOADING):
                raise InfrastructureError(f"the model was not loaded within {LOADING:g} s; check the machine")
            self.check()
            field, most = self._context
            if most is not None and most > self.facts["context"]:
                raise InputError(f"{field}: must be at most {self.facts['context']}, that of the model, got {most}")
        except BaseException:
            self._end()
            raise
        about = "{engine} engine, {dtype} on {device}, context {context}".format(**self.facts)
        print(f"serving {self._slot} {self._job.label(self._slot)}: {about}")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def check(self) -> None:
        """Raise the error that ended the server, or the budget that its callers would exceed."""
        error = self._error
        if error is None and self._process.poll() is not None:
            error = InfrastructureError("the server of the model ended; see log.txt, then retry")
        if error is not None:
            raise error

    def _end(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS)
        self._process.kill()
        self._process.wait()
        if self._reader.ident:
            self._reader.join()
        if self._process.returncode:  # without a last report, answers in progress may have spent what was reserved
            self.tokens += self._reserved
        self._record(0)

    def _read(self) -> None:
        """Take the server's reports until it ends; keep the error that ends it, or this thread."""
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                found = json.loads(line)
                if "error" in found:
                    kind = InputError if found["exit_code"] == InputError.exit_code else JobFailedError
                    raise kind(found["error"])
                if "url" in found:
                    self.url, self.facts = found["url"], found["facts"]
                    self._started.set()
                else:
                    self._take(found)
        except Exception as error:  # also of the disk, to which the spent tokens are written
            self._error = self._error or error
        self._error = self._error or InfrastructureError("the server of the model ended; see log.txt, then retry")
        self._started.set()

    def _take(self, report: Mapping[str, Any]) -> None:
        """Count the spent tokens, and grant more if the budget has room."""
        self.tokens, self.answered, self.refused = report["spent"], report["answered"], report["refused"]
        held, wanted, limit = report["held"], report["wanted"], self._limit
        if limit is None:
            self._record(held + wanted)
            return
        before, over = self._granted, self.tokens + wanted > limit
        if wanted and over and not held:  # while answers are in progress, they may spend less than they can
            short = tokens_short("the next answer", wanted, self.tokens, limit, self._job.order.tokens_declared)
            self._error = self._error or BudgetExceededError(f"{short}; raise budget.tokens")
        elif wanted:
            self._granted = max(before, min(limit, self.tokens + held + wanted + _GRANT))
        self._record(max(self._granted - self.tokens, 0))
        if self._granted > before:  # the server asks again when an answer ends, so an equal grant would only wake it
            self._tell({"granted": self._granted})

    def _record(self, reserved: int) -> None:
        self._reserved = reserved
        if self._budgeted:
            self._job.meter(self.tokens, reserved)

    def _tell(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, which the reader reports
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
