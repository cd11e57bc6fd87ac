"""Computes the responses to a request: generations, and scorings if log-probabilities of a whole text are requested."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.serving.engines import Scored, Served
from posttrain.serving.texts import Growing
from posttrain.serving.wire import MOST_CHOICES, Asked, Choice

_MOST_LOGPROBS = 1 << 20  # in one answer


def refuse_unfit(asked: Asked, served: Served, most: int) -> None:
    """Refuse prompts that the model cannot read, or that leave no room for their responses.

    Args:
        most: maximum tokens of a prompt with its response; the model's context may be shorter.

    Raises:
        InputError: with the field, the constraint and the value.
    """
    context, vocabulary = min(most, served.context), int(served.engine.facts["vocabulary"])
    field = {"completion": "prompt", "chat": "messages", "tokens": "token_ids"}[asked.form]
    if not 1 <= asked.choices <= MOST_CHOICES:
        raise InputError(
            f"{field}: must ask for 1 to {MOST_CHOICES} responses, got {asked.choices}; send fewer prompts"
        )
    if asked.limit == 0 and not asked.echo:
        raise InputError("max_tokens: must be at least 1 without echo, got 0; raise it")
    if asked.limit == 0 and asked.stream:
        raise InputError("stream: needs max_tokens of at least 1, got 0; leave one of them out")
    for prompt in asked.prompts:
        if not prompt:
            raise InputError(f"{field}: must have at least one token, got none; send a prompt")
        if max(prompt) >= vocabulary:
            raise InputError(f"{field}: tokens must be in 0..{vocabulary - 1}, got {max(prompt)}; use its tokenizer")
        limit = 1 if asked.limit is None else asked.limit
        if len(prompt) + limit > context:
            raise InputError(
                f"{field}: the context has {context} tokens, got {len(prompt)} and up to {limit} more; shorten the "
                "prompt or lower max_tokens"
            )
    _refuse_many_logprobs(asked, context, vocabulary)
    tempered = not asked.sampling["greedy"] and asked.sampling["temperature"] != 1
    if asked.form == "tokens" and asked.top and tempered:
        raise InputError("logprobs: must be 0 at a temperature other than 0 and 1, got more; set logprobs: 0")


def _refuse_many_logprobs(asked: Asked, context: int, vocabulary: int) -> None:
    """Refuse an answer with more log-probabilities than a server sends while it serves others."""
    top = max(asked.top or 0, asked.prompt_top or 0)
    name = "prompt_logprobs" if asked.prompt_top == top and not asked.echo else "logprobs"
    if top > vocabulary:
        raise InputError(f"{name}: must be at most {vocabulary}, the vocabulary, got {top}; lower it")
    prompts = sum(map(len, asked.prompts))
    limits = asked.n * sum(context - len(one) if asked.limit is None else asked.limit for one in asked.prompts)
    places = 0 if asked.prompt_top is None else prompts * asked.n
    places += 0 if asked.top is None else limits
    if places * (1 + top) > _MOST_LOGPROBS:
        raise InputError(
            f"{name}: must be at most {_MOST_LOGPROBS} in all, got up to {places} tokens with {1 + top} each; lower "
            f"{name}, max_tokens or n, or send fewer prompts"
        )


def policy_of(asked: Asked, served: Served) -> str:
    """Return the policy of the engine that the request names: an adapter by its name, or the model itself."""
    return asked.model if asked.model in served.release.adapters else ""


async def choices(asked: Asked, served: Served, most: int) -> list[Choice]:
    """Return the complete responses."""
    begun = list(_begun(asked))
    if asked.limit == 0 or (asked.limit == 1 and asked.prompt_top is not None and asked.sampling["greedy"]):
        scored = await _scores(asked, served, begun)
        for one in begun:
            _end_from_scores(asked, served, one, scored[f"{asked.id}.{one.index}"])
        return begun
    async for part in served.engine.generate(_work(asked, served, begun, most), stream=False):
        one = begun[int(part.id.rpartition(".")[2])]
        growing = Growing(served.texts, asked.stop, skip_special=asked.skip_special)
        assert part.by is not None
        one.tokens, one.logprobs, one.by = part.tokens, part.logprobs, part.by
        one.text = growing.end(part.tokens, part.by)
    await _add_logprobs(asked, served, begun)
    return begun


async def stream(asked: Asked, served: Served, most: int) -> AsyncIterator[Choice]:
    """Yield the responses in pieces; whole ones where their log-probabilities are computed afterwards."""
    if asked.needs_scores:
        for one in await choices(asked, served, most):
            yield one
        return
    begun = list(_begun(asked))
    growing = [Growing(served.texts, asked.stop, skip_special=asked.skip_special) for _ in begun]
    async for part in served.engine.generate(_work(asked, served, begun, most), stream=True):
        index = int(part.id.rpartition(".")[2])
        offset = growing[index].length
        text = growing[index].end(part.tokens, part.by) if part.by else growing[index].add(part.tokens)
        piece = Choice(index, begun[index].prompt, part.tokens, text, part.by, part.logprobs, offset=offset)
        if asked.top is not None:
            piece.tops = [{token: value} for token, value in zip(part.tokens, part.logprobs, strict=True)]
        yield piece


def _begun(asked: Asked) -> Iterator[Choice]:
    for place, prompt in enumerate(asked.prompts):
        for sample in range(asked.n):
            yield Choice(place * asked.n + sample, prompt, [], "", None)


def _work(asked: Asked, served: Served, begun: Sequence[Choice], most: int) -> list[Mapping[str, Any]]:
    """Return the generations; random numbers are those of `posttrain sample` with the same seed."""
    context, found, policy = min(most, served.context), list[Mapping[str, Any]](), policy_of(asked, served)
    for one in begun:
        limit = context - len(one.prompt) if asked.limit is None else asked.limit
        key, sample = divmod(one.index, asked.n)
        place = {"id": f"{asked.id}.{one.index}", "tokens": one.prompt, "key": key, "sample": sample, "policy": policy}
        found.append({**place, "limit": limit, "sampling": {**asked.sampling, "max_new_tokens": limit}})
    return found


async def _scores(asked: Asked, served: Served, begun: Sequence[Choice]) -> dict[str, Scored]:
    texts = {f"{asked.id}.{one.index}": [*one.prompt, *one.tokens] for one in begun}
    return await served.engine.score(texts, max(asked.top or 0, asked.prompt_top or 0), policy_of(asked, served))


async def _add_logprobs(asked: Asked, served: Served, begun: Sequence[Choice]) -> None:
    """Add the log-probabilities that the request asks for; those of a text replace those of the sampling."""
    if not asked.needs_scores:
        for one in begun if asked.top is not None else ():
            one.tops = [{token: value} for token, value in zip(one.tokens, one.logprobs, strict=True)]
        return
    scored = await _scores(asked, served, begun)

    def split() -> None:
        for one in begun:
            _split(asked, one, scored[f"{asked.id}.{one.index}"])

    await asyncio.to_thread(split)


def _split(asked: Asked, one: Choice, scored: Scored) -> None:
    """Divide the scores of a text between prompt and response."""
    following, begin = [*one.prompt[1:], *one.tokens], len(one.prompt) - 1
    widths = [asked.prompt_top or 0] * begin + [asked.top or 0] * len(one.tokens)
    tops: list[Mapping[int, float]] = [
        {**dict(islice(top.items(), width)), token: value}
        for top, width, token, value in zip(scored.tops(), widths, following, scored.logprobs, strict=True)
    ]
    one.before, one.before_tops, one.tops = scored.logprobs[:begin], tops[:begin], tops[begin:]
    if asked.form != "tokens" or asked.sampling["greedy"]:
        one.logprobs = scored.logprobs[begin:]


def _end_from_scores(asked: Asked, served: Served, one: Choice, scored: Scored) -> None:
    """End a response of no token, or of the likeliest one, which the scores of the prompt contain."""
    _split(asked, one, scored)
    one.by = "truncated"
    if asked.limit:
        one.tokens, one.logprobs = scored.next_tokens[:1], scored.next_logprobs[:1]
        after = dict(zip(scored.next_tokens, scored.next_logprobs, strict=True))
        one.tops = [dict(islice(after.items(), max(1, asked.top or 0)))]
        one.text = served.texts.decode(one.tokens, skip_special=asked.skip_special)
