"""Says what a model answers to some prompts, with the decoder that training samples with.

Asked: `{"folder", "name", "rows", "samples", "max_new_tokens", "temperature", "seed", "stop", "top_k", "top_p",
"min_p", "runtime"}`; a temperature of 0 takes the most likely tokens, and without `max_new_tokens` there are 256, or as
many as the context leaves. Answered, first the device and fall-backs, then a line for each response: `{"prompt",
"sample", "text", "tokens", "truncated", "logprob"}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.domain.canonical import derive_seed
from posttrain.engine.models.chat import decode_response, encode_prompts
from posttrain.engine.models.loading import ModelSource, load_tokenizer
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.generating import generate
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import decoding_fallbacks, open_rollout
from posttrain.engine.settings import InferenceRuntimeConfig
from posttrain.jobs.bodies.training import settled_device

_USUAL_TOKENS = 256
_ROWS_PER_CALL = 64  # responses between two answers


def sample(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Answers, prompt by prompt."""
    runtime, folder = InferenceRuntimeConfig.model_validate(request["runtime"]), Path(request["folder"])
    limit, samples, temperature = request["max_new_tokens"], request["samples"], request["temperature"]
    device = settled_device(runtime)
    tokenizer = load_tokenizer(folder)
    model = ModelSource(folder, runtime.dtype).open(device)
    rows, name = request["rows"], request["name"]
    prompts = encode_prompts(tokenizer, rows, name=name, limit=model.context_length, reserve=limit or 1)
    most = limit or min(_USUAL_TOKENS, model.context_length - min(map(len, prompts)))
    seed = derive_seed(request["seed"], "sample")
    among, stop = {name: request[name] for name in ("top_k", "top_p", "min_p")}, tuple(request["stop"])
    sampling = SamplingParams(most, temperature or 1.0, greedy=temperature == 0, seed=seed, stop=stop, **among)
    rollout = open_rollout(model, texts=StopStrings(tokenizer))
    yield {"device": device, "fallbacks": decoding_fallbacks(model)}
    step = max(1, _ROWS_PER_CALL // samples)
    for start in range(0, len(prompts), step):
        chunk = prompts[start : start + step]
        keys = range(start, start + len(chunk))
        room = [min(most, model.context_length - len(prompt)) for prompt in chunk for _ in range(samples)]
        answers = generate(rollout, chunk, samples=samples, sampling=sampling, prompt_keys=keys, limits=room)
        for at, found in enumerate(answers):
            yield {
                "prompt": start + at // samples,
                "sample": at % samples,
                "text": decode_response(tokenizer, found.response.tolist(), ended=found.closed),
                "tokens": found.generated,
                "truncated": found.truncated,
                "logprob": float(found.logprobs.sum(dtype="float64")),
            }
