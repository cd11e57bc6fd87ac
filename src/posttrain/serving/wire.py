"""Requests and answers of a served model: OpenAI's completions and chats, and token ids in and out.

A request is checked before it takes a turn. A field that would change the answer and is not implemented is refused;
fields that only describe the caller are accepted. `Asked` is the common form of all three kinds of request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from posttrain.domain.canonical import derive_seed
from posttrain.domain.errors import InputError
from posttrain.domain.rendering import LEAST_TEMPERATURE, stop_fault
from posttrain.domain.validation import validated
from posttrain.serving.texts import Texts

MOST_CHOICES = 1024  # responses of one request
MOST_TOP = 20  # likeliest tokens at each place
MOST_PROMPT_TOP = 128  # the same of prompts, which a teacher of distillation needs
_USUAL_TOKENS = 16  # of a completion without `max_tokens`, as at OpenAI
# fields that are not implemented, with the values that change nothing
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "reasoning_effort": (),
    "modalities": (["text"],),
}
_DESCRIBING = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id")
M = TypeVar("M", bound=BaseModel)
Count = Annotated[int, Field(ge=0, le=10**9)]


class _Request(BaseModel):
    """The fields of all kinds of request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""  # the served model, or an adapter of it; "": the served model
    temperature: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] = 1.0  # 0: the most likely tokens
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=10**9)] = 0  # -1 and 0: all tokens
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # None: another one for each request
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: list[str] | str | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False


class CompletionRequest(_Request):
    """The body of `POST /v1/completions`."""

    prompt: Any  # text, texts, token ids, or lists of them: see `_prompts`
    max_tokens: Count | None = _USUAL_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_PROMPT_TOP)] | None = None
    echo: bool = False
    add_special_tokens: bool = True


class ChatRequest(_Request):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=10**9)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=10**9)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    add_generation_prompt: bool = True


class SamplingRequest(_Request):
    """The `sampling_params` of a `TokensRequest`."""

    max_tokens: Annotated[int, Field(ge=1, le=10**9)] | None = _USUAL_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_PROMPT_TOP)] | None = None


class TokensRequest(BaseModel):
    """The body of `POST /inference/v1/generate`: token ids in and out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""
    token_ids: Any
    sampling_params: SamplingRequest = SamplingRequest()
    stream: bool = False
    stream_options: dict[str, bool] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in the form for the engine: `n` responses to each prompt."""

    form: Literal["completion", "chat", "tokens"]
    id: str
    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    limit: int | None  # maximum tokens of a response; None: what the context leaves
    sampling: Mapping[str, Any]  # the fields of `SamplingParams` but the limit
    top: int | None = None  # likeliest tokens at each place of a response; None: no log-probabilities
    prompt_top: int | None = None  # the same for the prompts
    echo: bool = False  # whether the answer begins with the prompt
    stream: bool = False
    usage: bool = False  # whether a stream ends with the usage
    skip_special: bool = True
    ids: bool = False  # whether the answer has token ids
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a response."""
        return tuple(self.sampling["stop"])

    @property
    def choices(self) -> int:
        """The number of responses."""
        return self.n * len(self.prompts)

    def most_tokens(self, context: int) -> int:
        """Return the most tokens that the answer can spend: those of the prompts once, and of all responses."""
        return sum(
            len(one) + self.n * (context - len(one) if self.limit is None else self.limit) for one in self.prompts
        )

    @property
    def needs_scores(self) -> bool:
        """Whether the log-probabilities are those of a text, not those with which its tokens were drawn."""
        drawn = self.sampling["greedy"] or self.sampling["temperature"] == 1.0 or self.form == "tokens"
        return self.prompt_top is not None or (self.top is not None and (self.top > 0 or not drawn))


def _parsed(kind: type[M], body: Mapping[str, Any]) -> M:
    """Return the request with this body.

    Raises:
        InputError: a field is unknown, or its value is not valid or not implemented.
    """
    given = {name: value for name, value in body.items() if name not in _DESCRIBING and value is not None}
    for name in _NEUTRAL.keys() & given.keys():
        if given[name] not in _NEUTRAL[name]:
            raise InputError(f"{name}: is not implemented, got {str(given[name])[:80]!r}; leave it out")
        if name not in kind.model_fields:
            del given[name]
    return validated(kind, given, "request")


def _prompts(given: Any) -> list[Any]:
    """Return the prompts of a completion request, each a text or a list.

    Checked by hand: for a union, pydantic collects an error for each of a million tokens.
    """
    prompts = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(prompts) > MOST_CHOICES:
        raise InputError(f"prompt: must be at most {MOST_CHOICES} prompts, got {len(prompts)}; send fewer")
    return prompts


def _tokens_of(prompt: Any, texts: Texts, special: bool, field: str = "prompt") -> tuple[int, ...]:
    """Return the tokens of one prompt.

    Raises:
        InputError: it is neither text nor token ids, or longer than the context in any case.
    """
    if not isinstance(prompt, str | list):
        raise InputError(f"{field}: must be text, token ids, or a list of prompts, got {prompt!r:.60}; change it")
    texts.refuse_long(prompt, field)
    if isinstance(prompt, str):
        return tuple(texts.encode(prompt, special=special))
    odd = next((one for one in prompt if type(one) is not int or not 0 <= one < 2**31), None)
    if odd is not None:
        raise InputError(f"{field}: token ids must be whole numbers from 0, got {odd!r:.60}; change it")
    return tuple(prompt)


def asked_completion(body: Mapping[str, Any], name: str, seed: int, texts: Texts) -> Asked:
    """Return the common form of a completion request.

    Args:
        name: the id of the answer.
        seed: of the sampling, if the request has none.
    """
    asked = _parsed(CompletionRequest, body)
    if asked.prompt_logprobs is not None and (asked.echo or asked.stream):
        raise InputError(f"prompt_logprobs: needs {'echo' if asked.echo else 'stream'}: false; leave one of them out")
    encoded = tuple(_tokens_of(one, texts, asked.add_special_tokens) for one in _prompts(asked.prompt))
    scored = asked.echo and asked.logprobs is not None
    return Asked(
        "completion", name, asked.model, encoded, asked.n, asked.max_tokens,
        _sampling(asked, seed, ignore_eos=scored),
        asked.logprobs, asked.logprobs if scored else asked.prompt_logprobs, asked.echo, asked.stream,
        _usage(asked.stream_options),
        asked.skip_special_tokens, asked.return_token_ids,
    )  # fmt: skip


def asked_chat(body: Mapping[str, Any], name: str, seed: int, texts: Texts) -> Asked:
    """Return the common form of a chat request; see `asked_completion`."""
    asked = _parsed(ChatRequest, body)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InputError("top_logprobs: needs logprobs: true, got false; set it")
    messages = [_message(message, place) for place, message in enumerate(asked.messages)]
    texts.refuse_long("".join(str(one["content"]) for one in messages), "messages")
    tools = None if asked.tool_choice == "none" else asked.tools
    prompt = texts.chat(messages, tools, generate=asked.add_generation_prompt)
    return Asked(
        "chat", name, asked.model, (tuple(prompt),), asked.n, asked.max_completion_tokens or asked.max_tokens,
        _sampling(asked, seed), (asked.top_logprobs or 0) if asked.logprobs else None, stream=asked.stream,
        usage=_usage(asked.stream_options), skip_special=asked.skip_special_tokens, ids=asked.return_token_ids,
    )  # fmt: skip


def asked_tokens(body: Mapping[str, Any], name: str, seed: int, texts: Texts) -> Asked:
    """Return the common form of a request for tokens; see `asked_completion`."""
    asked = _parsed(TokensRequest, body)
    if not isinstance(asked.token_ids, list):
        raise InputError(f"token_ids: must be token ids, got {asked.token_ids!r:.60}; change it")
    params, prompt = asked.sampling_params, _tokens_of(asked.token_ids, texts, False, "token_ids")
    return Asked(
        "tokens", name, asked.model, (prompt,), params.n, params.max_tokens,
        _sampling(params, seed), params.logprobs, params.prompt_logprobs,
        stream=asked.stream or params.stream, usage=_usage(asked.stream_options), ids=True,
    )  # fmt: skip


def _sampling(asked: _Request, seed: int, *, ignore_eos: bool = False) -> dict[str, Any]:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if fault := stop_fault(stop):
        raise InputError(f"stop: {fault}")
    greedy = asked.temperature == 0
    if not greedy and asked.temperature < LEAST_TEMPERATURE:
        raise InputError(
            f"temperature: must be 0 or at least {LEAST_TEMPERATURE:g}, got {asked.temperature:g}; use 0 for the most "
            "likely tokens"
        )
    return {
        "temperature": 1.0 if greedy else asked.temperature,
        "greedy": greedy,
        "top_k": 0 if greedy else max(0, asked.top_k),
        "top_p": 1.0 if greedy else asked.top_p,
        "min_p": 0.0 if greedy else asked.min_p,
        "seed": derive_seed(seed if asked.seed is None else asked.seed, "sample"),  # draws as `posttrain sample` does
        "ignore_eos": asked.ignore_eos or ignore_eos,
        "stop": [] if ignore_eos else stop,
    }


def _usage(options: Mapping[str, bool] | None) -> bool:
    if odd := next((name for name in options or () if name != "include_usage"), None):
        raise InputError(f"stream_options.{odd[:40]}: is not implemented; use include_usage")
    return bool(options and options.get("include_usage"))


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a message whose content is text, as templates of language models expect."""
    if not isinstance(message.get("role"), str):
        raise InputError(f"messages.{place}.role: must be text, got {message.get('role')!r:.40}; name one")
    content = message.get("content")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if odd := [kind for kind in kinds if kind != "text"]:
            raise InputError(f"messages.{place}.content: must be parts of type text, got {odd[0]!r:.40}; send text")
        said = [part.get("text") for part in content]
        content = "".join(said) if all(isinstance(one, str) for one in said) else said
    if not isinstance(content, str) and (content is not None or message["role"] != "assistant"):  # it may call tools
        raise InputError(f"messages.{place}.content: must be text, got {content!r:.40}; send text")
    return {**message, "content": content}


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Choice:
    """One response: its tokens with log-probabilities, those of the prompt before them if they were asked for."""

    index: int
    prompt: tuple[int, ...]
    tokens: list[int]
    text: str
    by: str | None  # what ended it: end, string, truncated or aborted; None: more follows
    logprobs: list[float] = field(default_factory=list)  # of `tokens`
    tops: list[Mapping[int, float]] = field(default_factory=list)  # token → log-probability, for each of `tokens`
    offset: int = 0  # characters of the response before `tokens`
    before: list[float] = field(default_factory=list)  # of the prompt, without its first token
    before_tops: list[Mapping[int, float]] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """The finish reason."""
        return {"end": "stop", "string": "stop", "truncated": "length", "aborted": "abort"}.get(self.by or "")


def usage(asked: Asked, tokens: int) -> dict[str, int]:
    """Return the usage of a request; each prompt counts once."""
    prompts = sum(map(len, asked.prompts))
    return {"prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens}


def answer(
    asked: Asked, choices: Sequence[Choice], model: str, digest: str, texts: Texts, *, chunk: bool, first: bool = True
) -> dict[str, Any]:
    """Return the body of an answer without its usage, or a chunk of a stream.

    Args:
        first: whether a chunk is the first of its choice.
    """
    shaped = {"completion": _completion, "chat": _chat, "tokens": _tokens}[asked.form]
    kind = {"completion": "text_completion", "chat": "chat.completion", "tokens": "tokens"}[asked.form]
    return {
        ("request_id" if asked.form == "tokens" else "id"): asked.id,
        "object": f"{kind}.chunk" if chunk and asked.form == "chat" else kind,
        "created": asked.created,
        "model": model,
        "system_fingerprint": digest,
        "choices": [
            {**shaped(asked, one, texts, chunk, first), **_ids(asked, one, first)} for one in choices
        ],
    }  # fmt: skip


def _ids(asked: Asked, one: Choice, first: bool) -> dict[str, Any]:
    if not asked.ids:
        return {}
    prompt = {"prompt_token_ids": list(one.prompt)} if first and asked.form != "tokens" else {}
    return {"token_ids": one.tokens, **prompt}


def _completion(asked: Asked, one: Choice, texts: Texts, chunk: bool, first: bool) -> dict[str, Any]:
    echoed = asked.echo and first
    text = (texts.decode(one.prompt, skip_special=asked.skip_special) if echoed else "") + one.text
    found: dict[str, Any] = {"index": one.index, "text": text, "finish_reason": one.reason, "logprobs": None}
    if asked.top is not None:
        tokens = [*(one.prompt if echoed else ()), *one.tokens]
        logprobs: list[float | None] = [*([None, *one.before] if echoed else []), *one.logprobs]
        begin = one.offset + (len(texts.decode(one.prompt, skip_special=asked.skip_special)) if asked.echo else 0)
        begin = 0 if echoed else begin
        tops = [*([None, *one.before_tops] if echoed else []), *one.tops]
        found["logprobs"] = {
            "tokens": [texts.name(token) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": [top and {texts.name(token): value for token, value in top.items()} for top in tops],
            "text_offset": [begin + place for place in texts.lengths(tokens, skip_special=asked.skip_special)],
        }
    return found | (_prompt_logprobs(asked, one) if first and not asked.echo else {})


def _chat(asked: Asked, one: Choice, texts: Texts, chunk: bool, first: bool) -> dict[str, Any]:
    said = {"content": one.text} if chunk else {"content": one.text, "refusal": None}
    message = {"role": "assistant", **said} if first or not chunk else said
    return {
        "index": one.index,
        ("delta" if chunk else "message"): message,
        "finish_reason": one.reason,
        "logprobs": None if asked.top is None else {"content": _named(asked, one, texts)},
    }


def _tokens(asked: Asked, one: Choice, texts: Texts, chunk: bool, first: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"index": one.index, "finish_reason": one.reason, "logprobs": None}
    if asked.top is not None:
        found["logprobs"] = {"content": _named(asked, one, texts)}
    return found | (_prompt_logprobs(asked, one) if first else {})


def _prompt_logprobs(asked: Asked, one: Choice) -> dict[str, Any]:
    """Return token id → log-probability at each place of the prompt but the first, in the form of vLLM."""
    if asked.prompt_top is None:
        return {}
    tops = ({str(token): {"logprob": value} for token, value in top.items()} for top in one.before_tops)
    return {"prompt_logprobs": [None, *tops]}


def _named(asked: Asked, one: Choice, texts: Texts) -> list[dict[str, Any]]:
    def entry(token: int, value: float) -> dict[str, Any]:
        name = f"token_id:{token}" if asked.form == "tokens" else texts.name(token)
        text = not name.startswith("token_id:") and "\ufffd" not in name  # others are a part of a character
        return {"token": name, "logprob": value, "bytes": list(name.encode()) if text else None}

    tops: Sequence[Mapping[int, float]] = one.tops or [{} for _ in one.tokens]
    most = asked.top or 0
    return [
        {**entry(token, value), "top_logprobs": [entry(*pair) for pair in list(top.items())[:most]]}
        for token, value, top in zip(one.tokens, one.logprobs, tops, strict=True)
    ]
