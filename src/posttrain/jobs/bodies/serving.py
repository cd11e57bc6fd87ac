"""The engine of a served model: one process that samples and scores for a server until the server ends.

The first line of standard input is the request, and each further line an order; every answer is a line:

- `{"generate": [GENERATION, …], "stream": true}`: each generation has the fields of `Generation`, with `sampling` as
  the fields of `SamplingParams`. The answers are `deltas`, `[id, tokens, log-probabilities]`, if the order streams, and
  once for each generation `done`: `[id, tokens, log-probabilities, ended by]` with the tokens after the deltas.
- `{"score": {"texts": {id: tokens, …}, "top", "policy"}}`: the answers are `scored`, for each text `[id,
  log-probabilities, likeliest tokens, their log-probabilities, likeliest next tokens, their log-probabilities]`. Texts
  of different orders are never scored together, so an order has the same answer in any company.
- `{"abort": [id, …]}`: these generations are `done` with their tokens so far.
- `failed`, `[id, message, whether the request is at fault]`, answers an order that cannot be carried out. A generation
  or an order of texts with logits that are not finite fails alone: the engine drops all its generations, and generates
  the others again. A stream fails if its first tokens change thereby, as they can in bfloat16. Another error of
  the model ends all orders in progress, and the engine continues.

Scorings wait for each other, not for generations: between two steps of decoding, the engine scores at most one pack.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.validation import validated
from posttrain.engine.models.adapters import attach_saved, attached, fill, in_folder, read_adapter, trained_parameters
from posttrain.engine.models.files import ModelSource, load_tokenizer
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.port import (
    Completion,
    Generation,
    NotFiniteError,
    PromptLogprobs,
    RolloutEngine,
    SamplingParams,
)
from posttrain.engine.rollout.worker import decoding_fallbacks, open_rollout
from posttrain.engine.settings import InferenceRuntimeConfig
from posttrain.jobs.bodies.training import settled_device

_DIFFERS = "the response had to be generated again, and its first tokens differ from those sent; repeat the request"
_PACK = 8192  # tokens of texts scored between two steps of decoding
Orders = queue.SimpleQueue[str]
END = ""  # the line after the last one


def serve(asked: tuple[Mapping[str, Any], IO[str]]) -> Iterator[Mapping[str, Any]]:
    """Open a model; yield its facts, and then the answers to the orders."""
    request, lines = asked
    runtime, folder = validated(InferenceRuntimeConfig, request["runtime"], "serve-model"), Path(request["folder"])
    device, tokenizer = settled_device(runtime), load_tokenizer(folder)
    model = ModelSource(folder, runtime.dtype).open(device)
    adapters = {name: Path(place) for name, place in request.get("adapters", {}).items()}
    _refuse_broken(model, request["folder"])
    if adapters and attached(model.module) is None:
        attach_saved(model.module, next(iter(adapters.values())))
    rollout = open_rollout(model, request.get("kv_cache"), texts=StopStrings(tokenizer))
    if adapters:
        _keep(model, rollout, folder, adapters)
    orders = Orders()
    threading.Thread(target=_read, args=(lines, orders), daemon=True).start()
    yield {
        "context": rollout.context_length,
        "vocabulary": model.vocab_size,
        "ends": sorted(model.eos_token_ids),
        "device": device,
        "dtype": str(model.dtype).removeprefix("torch."),
        "engine": rollout.name,
        "fallbacks": decoding_fallbacks(model),
    }
    yield from Serving(rollout).answers(orders)


def _refuse_broken(model: LanguageModel, name: str) -> None:
    """Raise InputError if a weight is not finite: one response with NaN ends all responses in progress."""
    wrong = next((at for at, part in model.module.named_parameters() if not bool(part.isfinite().all())), None)
    if wrong is not None:
        raise InputError(f"{name}: weights must be finite, got NaN or infinity in {wrong}; serve another model")


def _keep(model: LanguageModel, rollout: RolloutEngine, folder: Path, adapters: Mapping[str, Path]) -> None:
    """Serve adapters of the model's base, each under its name.

    Raises:
        InputError: the model is not decoded natively, or the form of an adapter differs from that of the first one.
    """
    own, module = attached(model.module), model.module
    assert own is not None
    if not isinstance(rollout, NativeRollout):
        reason = next(iter(decoding_fallbacks(model).values()), rollout.name)
        raise InputError(f"adapters by name need the native decoder, got {reason}; serve each as a separate model")
    for name, place in adapters.items():
        form = read_adapter(place)
        if (form.rank, form.scale, {*form.targets}) != (own.rank, own.scale, {*own.targets}):
            raise InputError(
                f"adapter {name}: must have the rank {own.rank}, the scale {own.scale:g} and the targets of the first "
                f"adapter, got rank {form.rank} and scale {form.scale:g}; serve it as a separate model"
            )
        fill(module, place)
        _refuse_broken(model, name)
        rollout.keep(name)
    if in_folder(folder):
        fill(module, folder)
    else:  # the base alone
        with torch.no_grad():
            for name, part in trained_parameters(module):
                if "lora_B" in name:
                    part.zero_()


def _read(lines: IO[str], orders: Orders) -> None:
    for line in lines:
        orders.put(line)
    orders.put(END)


class Serving:
    """Carries out orders on a rollout engine, as they arrive."""

    def __init__(self, rollout: RolloutEngine) -> None:
        self._rollout = rollout
        self._unanswered: dict[str, Mapping[str, Any]] = {}  # generation → its order
        self._streams: dict[str, list[int]] = {}  # generation → its tokens that were in deltas
        self._again: dict[str, int] = {}  # generation that begins again → number of these tokens that came again
        self._packs: list[Mapping[str, Any]] = []  # that wait to be scored

    def answers(self, orders: Orders) -> Iterator[Mapping[str, Any]]:
        """Yield answers until the orders end and all of them are answered."""
        ended = False
        while not (ended and not self._unanswered and not self._packs):
            failed: list[tuple[str, str, bool]] = []
            for line in _taken(orders, wait=not (ended or self._unanswered or self._packs)):
                ended |= line == END
                failed += self._take(line)
            found: dict[str, Any] = {"failed": failed}
            try:
                found["scored"] = self._score(failed)
                done = self._rollout.completed(0.0) if self._unanswered else []
                found["deltas"] = self._deltas(failed) if self._streams else []
                found["done"] = self._ended(done, failed)
            except PosttrainError as error:
                ids = error.ids & self._unanswered.keys() if isinstance(error, NotFiniteError) else None
                found["done"] = self._begin_again(ids, failed) if ids else []
                failed += [(one, str(error), False) for one in ids or self._take_all()]
            if any(found.values()):
                yield {name: value for name, value in found.items() if value}

    def _take(self, line: str) -> list[tuple[str, str, bool]]:
        """Begin one order; return its failures."""
        order = json.loads(line or "{}")
        if "abort" in order:
            self._rollout.abort(order["abort"])
            self._packs = [pack for pack in self._packs if pack["texts"].keys() - set(order["abort"])]
        if "score" in order:
            self._packs += _packs(order["score"])
        if "generate" not in order:
            return []
        ids = [one["id"] for one in order["generate"]]
        try:
            self._rollout.submit([_generation(one) for one in order["generate"]])
        except InputError as error:
            return [(one, str(error), True) for one in ids]
        self._unanswered |= {one["id"]: one for one in order["generate"]}
        self._streams |= {one: [] for one in ids} if order.get("stream") else {}
        return []

    def _score(self, failed: list[tuple[str, str, bool]]) -> list[Sequence[Any]]:
        """Score the first pack; return its answers, and add what cannot be scored to `failed`."""
        if not self._packs:
            return []
        pack = self._packs[0]
        try:
            found = self._rollout.score(list(pack["texts"].values()), pack["top"], pack["policy"])
        except (InputError, NotFiniteError) as error:
            failed += [(text, str(error), isinstance(error, InputError)) for text in pack["texts"]]
            found = []
        del self._packs[0]  # after another error, it fails with the others
        return [(text, *_scores(scores)) for text, scores in zip(pack["texts"], found, strict=False)]

    def _deltas(self, failed: list[tuple[str, str, bool]]) -> list[Sequence[Any]]:
        """Return the new tokens of streams; add streams whose tokens came again differently to `failed`."""
        found = list[Sequence[Any]]()
        for delta in self._rollout.progress():
            sent, tokens = self._streams.get(delta.id), delta.tokens.tolist()
            if sent is None:
                continue
            at = self._again.pop(delta.id, len(sent))
            known = min(len(sent) - at, len(tokens))
            if tokens[:known] != sent[at : at + known]:
                self._rollout.abort([delta.id])
                self._forget([delta.id])
                failed.append((delta.id, _DIFFERS, False))
                continue
            if at + known < len(sent):
                self._again[delta.id] = at + known
            if len(tokens) > known:
                sent += tokens[known:]
                found.append((delta.id, tokens[known:], delta.logprobs[known:].tolist()))
        return found

    def _ended(self, done: Sequence[Completion], failed: list[tuple[str, str, bool]]) -> list[Sequence[Any]]:
        """Return the ends of generations; add streams whose tokens came again differently to `failed`."""
        found = list[Sequence[Any]]()
        for one in done:
            sent, made = self._streams.get(one.id, []), one.trajectory
            tokens, begin = made.response.tolist(), len(sent)
            if tokens[:begin] == sent:
                by = "string" if made.stopped else "end" if made.status == "ok" else made.status
                found.append((one.id, tokens[begin:], made.logprobs[begin:].tolist(), by))
            else:
                failed.append((one.id, _DIFFERS, False))
        self._forget(one.id for one in done)
        return found

    def _forget(self, ids: Iterable[str]) -> None:
        for one in ids:
            for held in (self._unanswered, self._streams, self._again):
                held.pop(one, None)

    def _begin_again(self, broken: Collection[str], failed: list[tuple[str, str, bool]]) -> list[Sequence[Any]]:
        """Generate all unanswered generations again except the broken ones; return those that had ended."""
        done = self._ended(self._rollout.completed(0.0), failed)
        self._forget(broken)
        self._again = dict.fromkeys(self._streams, 0)
        self._rollout.submit([_generation(order) for order in self._unanswered.values()])
        return done

    def _take_all(self) -> list[str]:
        """Forget everything in progress, and return it: the engine has dropped its generations."""
        ids = [*self._unanswered, *(text for pack in self._packs for text in pack["texts"])]
        self._rollout.abort(self._unanswered)
        self._unanswered, self._streams, self._again, self._packs = {}, {}, {}, []
        return ids


def _taken(orders: Orders, *, wait: bool) -> Iterator[str]:
    """Yield the orders that have arrived; with `wait`, at least one."""
    if wait:
        yield orders.get()
    while True:
        try:
            yield orders.get_nowait()
        except queue.Empty:
            return


def _packs(order: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield an order's texts in packs of bounded size."""
    pack, size = dict[str, Sequence[int]](), 0
    for name, tokens in order["texts"].items():
        if pack and size + len(tokens) > _PACK:
            yield {**order, "texts": pack}
            pack, size = {}, 0
        pack[name] = tokens
        size += len(tokens)
    yield {**order, "texts": pack}


def _generation(order: Mapping[str, Any]) -> Generation:
    sampling = {**order["sampling"], "stop": tuple(order["sampling"].get("stop", ()))}
    return Generation(**{**order, "tokens": tuple(order["tokens"]), "sampling": SamplingParams(**sampling)})


def _scores(found: PromptLogprobs) -> Sequence[Any]:
    """Return the scores as JSON; the first token has neither a log-probability nor likelier tokens."""
    each = (found.logprobs, found.top_tokens, found.top_logprobs)
    return *(one[1:].tolist() for one in each), found.next_tokens.tolist(), found.next_logprobs.tolist()
