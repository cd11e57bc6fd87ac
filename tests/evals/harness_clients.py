"""Runs in the environment of the harnesses (`make .venv/.evals`), which has no Posttrain: `python … WHAT ARGUMENTS`.

lm-eval URL MODEL TASKS OUT   the tasks of a folder over a served model, and with the model's own weights
inspect URL TASK OUT          a task over a served model
openai URL OUT                the official client: completions, chats, streams, errors
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NOWHERE = "http://127.0.0.1:9"  # no server: only with the model's own weights


def lm_eval(url: str, folder: str, tasks: str, out: str) -> dict[str, Any]:
    """Metrics, items and seconds of both; the batch size of `hf` is the best of three."""
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    manager = TaskManager(include_path=tasks, include_defaults=False)
    names = sorted(path.stem for path in Path(tasks).glob("*.yaml"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    served = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model="served", tokenizer_backend="huggingface", tokenizer=folder,
        tokenized_requests=True, num_concurrent=8, batch_size=16, max_length=512, add_bos_token=False, max_retries=3,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name, lm in (
        *((("served", lambda: served),) if url != NOWHERE else ()),
        *((f"hf-{size}", lambda size=size: HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, device="cpu",
                                                max_length=512)) for size in (1, 16, 64)),
    ):  # fmt: skip
        opened = lm()
        begun = time.perf_counter()
        ran = simple_evaluate(model=opened, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0)
        seconds = time.perf_counter() - begun
        items = {
            task: [[row["doc_id"], row["filtered_resps"], *(row[metric] for metric in row["metrics"])] for row in rows]
            for task, rows in ran["samples"].items()
        }
        found[name] = {"results": ran["results"], "items": items, "seconds": seconds}
    return found


def inspect(url: str, task: str, out: str) -> dict[str, Any]:
    """The status and the answers of a task over the provider for servers of OpenAI's form."""
    os.environ.update(
        INSPECT_LOG_DIR=str(Path(out).parent / "logs"), POSTTRAIN_API_KEY="none", POSTTRAIN_BASE_URL=f"{url}/v1"
    )
    from inspect_ai import Task, eval
    from inspect_ai.dataset import json_dataset
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    [log] = eval(
        Task(dataset=json_dataset(task), solver=generate(), scorer=includes()), model="openai-api/posttrain/served",
        display="none", temperature=0.0, max_tokens=16, seed=1, log_format="json",
    )  # fmt: skip
    answers = {str(sample.id): sample.output.completion for sample in log.samples or []}
    return {"status": log.status, "answers": answers, "log": log.location}


def openai(url: str, out: str) -> dict[str, Any]:
    """What the official client returns."""
    import openai as package

    client = package.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "31"}]
    chat = client.chat.completions.create(
        model="served", messages=messages, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2, n=2
    )
    pieces = client.chat.completions.create(
        model="served", messages=messages, temperature=0, max_tokens=12, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, usage = "", None
    for piece in pieces:
        texts += "".join(choice.delta.content or "" for choice in piece.choices)
        usage = piece.usage or usage
    prompts = ["Q: 31\nA:", "Q: 7\nA:"]
    text = client.completions.create(model="served", prompt=prompts, temperature=0, max_tokens=8, echo=True)
    try:
        client.chat.completions.create(model="served", messages=messages, frequency_penalty=1.0)
        refused = ""
    except package.BadRequestError as error:
        refused = str(error.body)

    async def many() -> list[str]:
        each = package.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        asked = [each.completions.create(model="served", prompt="Q: 31\nA:", seed=n, max_tokens=8) for n in range(16)]
        return [one.choices[0].text for one in await asyncio.gather(*asked)]

    return {
        "chat": [one.message.content for one in chat.choices],
        "tops": len(chat.choices[0].logprobs.content[0].top_logprobs),
        "fingerprint": chat.system_fingerprint,
        "stream": texts,
        "usage": usage.total_tokens if usage else None,
        "completions": [one.text for one in text.choices],
        "refused": refused,
        "many": asyncio.run(many()),
        "models": [one.id for one in client.models.list().data],
    }


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    kinds = {"lm-eval": lm_eval, "inspect": inspect, "openai": openai}
    Path(sys.argv[-1]).write_text(json.dumps(kinds[sys.argv[1]](*sys.argv[2:]), default=str))
