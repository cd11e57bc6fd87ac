"""Every field of run.yaml that claims to matter does: it changes what a stage leaves, or what its plan says.

The cases are made from the schema. A field of another type than a choice or a switch needs a value in `VALUES`; one
that by design changes nothing needs a reason in `UNMOVED`. A new field with neither fails. Stages run as jobs do, from
an order to a result, with a model of two thousand parameters; what is shared between the cases is computed once.
"""

from __future__ import annotations

import copy
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from posttrain.domain.canonical import digest_bytes, digest_json
from posttrain.domain.jobs import InputBlob, JobOrder, Metric
from posttrain.domain.placement import Placement
from posttrain.engine.config import STAGE_CONFIGS, stage_config
from posttrain.engine.config.sampling import RoleConfig
from posttrain.engine.loop.controller import CONTROLLER_METRICS
from posttrain.engine.settings import ServedConfig
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.jobs import entry
from posttrain.jobs.bodies import evaluation, training
from posttrain.sandbox.port import RewardCall, ScriptedReward
from posttrain.store.attempts import AttemptFolder
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import put_tree

BODIES = {"evaluate": evaluation.body, "init_model": training.init_model}
OPTIMIZER = {"learning_rate": 2e-2, "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.1}
LETTERS = "0123456789Q:sort A"
PROBE = {"data": "probe", "every": 2, "items": 16, "extract": r"(?s)(.)"}
LOSS = {"data": "probe", "every": 2, "items": 5}
STOPS = {"patience": 1, "min_delta": 10.0}  # at the second probe, whatever it says
ON_POLICY: dict[str, Any] = {
    "data": "data", "steps": 4, "prompts_per_step": 3, "group_size": 4, "max_new_tokens": 5, "probe": PROBE,
    "optimizer": OPTIMIZER,
}  # fmt: skip
OVER_PAIRS = {"data": "pairs", "steps": 4, "batch_size": 3, "optimizer": OPTIMIZER, "probe": LOSS}
CRITIC = {"optimizer": {**OPTIMIZER, "learning_rate": 5e-2}}
WITH_CRITIC: dict[str, Any] = {
    **ON_POLICY, "reward": "reward", "mini_batches": 2, "ppo_epochs": 2, "critic": CRITIC,
    "kl": {"coefficient": 0.2, "estimator": "k3"},
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "sft": {"data": "data", "steps": 4, "batch_size": 3, "optimizer": OPTIMIZER, "probe": LOSS},
    "reward_model": {"data": "pairs", "steps": 4, "batch_size": 3, "optimizer": OPTIMIZER, "probe": LOSS},
    "grpo": {**ON_POLICY, "reward": "reward", "mini_batches": 2, "kl": {"coefficient": 0.2}},
    "ppo": WITH_CRITIC,
    "pf_ppo": {**WITH_CRITIC, "filter": "best_random"},
    "vapo": {**WITH_CRITIC, "critic": CRITIC | {"warmup": 1}, "gae": {"alpha": 2}},
    "dr_grpo": {**ON_POLICY, "reward": "reward", "mini_batches": 2, "kl": {"coefficient": 0.2}},
    "rloo": {**ON_POLICY, "reward": "reward", "mini_batches": 2, "kl": {"coefficient": 0.2}},
    "dapo": {**ON_POLICY, "reward": "reward", "mini_batches": 2, "overlong": {"buffer": 3, "penalty": 0.5}},
    "reinforce_plus_plus": {**ON_POLICY, "reward": "reward", "mini_batches": 2, "kl": {"coefficient": 0.2}},
    "distill": {
        **ON_POLICY, "teacher": "teacher", "reward": "reward", "mini_batches": 2, "divergence": "jsd", "top_k": 8,
    },
    **dict.fromkeys(("dpo", "orpo", "simpo"), OVER_PAIRS),
    "kto": {**OVER_PAIRS, "data": "labels", "batch_size": 4},
    "gspo": {**ON_POLICY, "reward": "reward", "mini_batches": 3, "kl": {"coefficient": 0.2}},
    "cispo": {**ON_POLICY, "reward": "reward", "mini_batches": 3, "kl": {"coefficient": 0.2}},
    "dataflow": {
        **ON_POLICY, "recipe": "flow:flow", "reward": "reward", "settings": {"accept": 0.4}, "tokens_per_step": 9999,
    },
    "evaluate": {
        "model": "model",
        "suites": {
            "held": {
                "data": "probe", "extract": r"(?s)(.)", "samples": 3, "pass_at": [1, 2], "max_new_tokens": 4,
                "reward": "reward",
            }
        },
    },
    "init_model": {
        "hidden_size": 8, "intermediate_size": 8, "layers": 1, "context_length": 32, "characters": LETTERS + "xyz",
    },
}  # fmt: skip
FLOW = (Path(__file__).resolve().parents[2] / "examples" / "04-best-of-n" / "best_of_n.py").read_text(encoding="utf-8")

# slot → the path that names it, where that is another
WRITTEN = {"probe": "probe.data", "suites.held": "suites.held.data", "rewards.held": "suites.held.reward"}
# Path, or "kind path", or the last two words of a path → the other value, and what must stand beside both values.
VALUES: dict[str, Any] = {
    "optimizer.learning_rate": 1e-2,
    "optimizer.betas": [0.5, 0.6],
    "optimizer.weight_decay": 0.9,
    "optimizer.warmup_steps": 3,
    "optimizer.final_ratio": 0.7,
    "optimizer.max_grad_norm": 0.02,
    "steps": 3,
    "batch_size": 2,
    "max_length": 5,  # too short: the rows are refused
    "prompts_per_step": 2,
    "group_size": 3,
    "max_new_tokens": 3,
    "temperature": 1.4,
    "stop": ["0", "1", "2", "3", "4", "5"],
    "mini_batches": 1,
    "clip_low": 0.01,
    "clip_high": 0.01,
    "reward_timeout": 60.0,
    "probe": None,
    "probe.every": 3,
    "probe.items": 3,
    "probe.extract": r"(no such answer)",
    "early_stopping": STOPS,
    "early_stopping.patience": 2,
    "early_stopping.min_delta": 0.0,
    "kl": None,
    "kl.coefficient": 2.0,
    "ppo_epochs": 1,
    "epochs": 2.0,  # in the place of steps
    "gae.gamma": 0.5,
    "gae.lam": 0.2,
    "critic.clip": 0.001,
    "gae.alpha": 0.5,
    "gae.critic_lam": 0.5,
    "positive.weight": 2.0,
    "positive.above": 0.9,
    "refills": 0,
    "overlong": None,
    "overlong.buffer": 5,
    "overlong.penalty": 0.9,
    "gamma": 0.5,
    "beta": 2.0,
    "distill beta": 0.9,
    "simpo beta": 5.0,
    "cispo clip_low": 0.001,
    "distill top_k": 2,
    "label_smoothing": 0.3,
    "desirable_weight": 2.0,
    "undesirable_weight": 2.0,
    "critic.warmup": 2,
    "settings": {"accept": 0.9},
    "lag": {"steps": 1},
    "turns": 2,  # nobody observes: refused
    "observation_tokens": 2,
    "tokens_per_step": 1,  # spends more: refused
    "suites.held.extract": r"(no such answer)",
    "suites.held.samples": 2,
    "suites.held.temperature": 1.7,
    "suites.held.top_k": 2,
    "suites.held.top_p": 0.3,
    "suites.held.min_p": 0.99,
    "suites.held.stop": ["0", "1", "2", "3", "4", "5"],
    "suites.held.pass_at": [1],
    "suites.held.max_new_tokens": 2,
    "suites.held.reward_range": [-1.0, 1.0],
    "suites.held.reward_timeout": 60.0,
    "init_model characters": LETTERS,
    "init_model hidden_size": 16,
    "init_model intermediate_size": 16,
    "init_model layers": 2,
    "init_model heads": 1,
    "init_model kv_heads": 2,
    "init_model context_length": 64,
    "adapter": {"lora": {"rank": 2, "alpha": 4.0}},
    "adapter.lora.rank": 3,
    "adapter.lora.alpha": 9.0,
    "adapter.lora.dropout": 0.5,
    "adapter.lora.targets": ["q_proj"],
    "placement": {"collocated": {"ranks": 2}},
    "roles": {"reference": {}},
    "runtime.sequence_parallel": 2,
    "runtime.ray_address": "127.0.0.1:6379",
    "runtime.micro_batch_tokens": 9,
    "runtime.activation_checkpointing": True,
    "runtime.kv_cache": "4MiB",
    "runtime.object_store": "1GiB",
    "runtime.shard_frozen": True,
    "runtime.start_timeout": 3600.0,
    "runtime.call_timeout": 7200.0,
}
ADAPTER = {"lora": {"rank": 2, "alpha": 4.0}}
APART = {"policy": {"cpus": 1}, "rollout": {"cpus": 1}}
ALONE: dict[str, dict[str, Any]] = {"turns": {"observation_tokens": 1}, "observation_tokens": {"turns": 2}}
BESIDE: dict[str, dict[str, Any]] = {
    **{f"{kind} kl.estimator=k3-corrected": {"kl.place": "loss"} for kind in ("ppo", "pf_ppo", "vapo")},
    "optimizer.schedule=constant": {},
    "dpo loss=robust": {"label_smoothing": 0.3},
}
# Of kinds that share a class with another one, these; the others are tried there.
_CLIPPED = ("clip_low", "clip_high", "mini_batches", "group_size", "kl")
OWN_FIELDS: dict[str, tuple[str, ...]] = {
    "dr_grpo": _CLIPPED,
    "rloo": _CLIPPED,
    "dapo": (*_CLIPPED, "refills", "overlong"),
    "reinforce_plus_plus": (*_CLIPPED, "baseline", "gamma"),
    "distill": ("mini_batches", "group_size", "teacher", "reward", "top_k", "divergence", "beta"),
    "dpo": ("data", "batch_size", "max_length", "probe", "beta", "label_smoothing", "loss"),
    "orpo": ("data", "batch_size", "max_length", "probe", "beta"),
    "simpo": ("data", "batch_size", "max_length", "probe", "beta", "gamma"),
    "kto": ("data", "batch_size", "max_length", "probe", "beta", "desirable_weight", "undesirable_weight"),
    "pf_ppo": ("group_size", "filter", "ppo_epochs", "gae", "kl", "critic"),
    "vapo": (*_CLIPPED, "ppo_epochs", "gae", "critic", "positive"),
    "gspo": ("clip_low", "clip_high", "mini_batches", "group_size", "kl"),
    "cispo": ("clip_low", "clip_high", "mini_batches", "group_size", "kl"),
}
# In the plan only: where and how large, which a result does not depend on but for rounding.
PLANNED = ("epochs", "placement", "roles", "lag", "runtime.sequence_parallel", "runtime.ray_address",
           "runtime.micro_batch_tokens", "runtime.activation_checkpointing", "runtime.kv_cache",
           "runtime.object_store", "runtime.start_timeout", "runtime.call_timeout",
           "runtime.shard_frozen")  # fmt: skip
UNMOVED: dict[str, str] = {
    "runtime.device=cpu": "auto is cpu where there is no GPU",
    "dpo loss=sigmoid": "the default, which a manifest leaves out",
    "runtime.device=cuda": "needs a GPU; the gpu tests compare it with the CPU",
    "runtime.dtype=float32": "auto is float32 on a CPU",
    "runtime.save_dtype=float32": "auto is what was computed in",
    "runtime.threads": "how fast",
    "rollout.engine": "auto is native for this model; test_engines.py opens each engine",
    "train.engine": "there is one of Posttrain's own; test_engines.py opens another",
    "runtime.checkpoint_every": "what is lost by a crash",
    "runtime.stall_after": "when a job is taken for hung",
    "trace.groups": "what a trace tells",
    "trace.bytes": "what a trace tells",
    "reward_errors_max": "when a stage gives up on its reward; nothing fails here",
}
SKIPPED = (
    "runtime.device=cuda",
    "runtime.threads=2",
    "train.engine=torch",
)  # sums of two threads differ in their last bits
UNMOVED_VALUES: dict[str, Any] = {
    "reward_errors_max": 0.5,
    "runtime.threads": 2,
    "runtime.checkpoint_every": 1,
    "runtime.stall_after": 60.0,
    "trace.groups": "all",
    "trace.bytes": 1000,
    "rollout.engine": "native",
    "train.engine": "torch",
}


@dataclass(frozen=True)
class Case:
    kind: str
    path: str
    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)  # beside the other value only
    swap: bool = False  # the path names an input: another content behind the same name

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + ("" if self.swap else f"={json.dumps(self.value)[:24]}")


def nested(annotation: Any) -> tuple[type[BaseModel] | None, bool, bool]:
    """The model inside an annotation, whether it may be left out, and whether it is a map of such."""
    arguments = [a for a in typing.get_args(annotation) if a is not types.NoneType]
    optional = types.NoneType in typing.get_args(annotation)
    found = [a for a in (annotation, *arguments) if isinstance(a, type) and issubclass(a, BaseModel)]
    return (found[0] if found else None), optional, typing.get_origin(annotation) is dict


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and annotation of every field; a model that may be left out is one too."""
    for name, info in model.model_fields.items():
        inner, optional, is_map = nested(info.annotation)
        path = f"{prefix}{info.alias or name}"
        if inner is ServedConfig:  # e2e/test_judge_models.py
            continue
        if inner is None or inner in (Placement, RoleConfig):  # roles: contract/test_declared_roles.py
            yield path, info.annotation
            continue
        if optional:
            yield path, info.annotation
        yield from leaves(inner, f"{path}.held." if is_map else f"{path}.")


def choices(annotation: Any) -> list[Any]:
    """Every value of a choice or switch; empty for other types."""
    if annotation is bool:
        return [False, True]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return []


def pick(params: Mapping[str, Any], path: str) -> Any:
    *above, last = path.split(".")  # what is not asked for is not written
    return functools.reduce(lambda held, word: held.get(word, {}), above, params).get(last, False)


def known(table: Mapping[str, Any], kind: str, path: str) -> str | None:
    tail = ".".join(path.split(".")[-2:])
    return next((key for key in (f"{kind} {path}", path, tail) if key in table), None)


@functools.cache
def normal(kind: str) -> dict[str, Any]:
    return stage_config(kind, BASES[kind]).model_dump(mode="json")


def cases() -> tuple[list[Case], list[Case], list[str]]:
    """What must change something, what must not, and what nobody thought of."""
    moved, unmoved, forgotten = [], [], []
    for kind, model in STAGE_CONFIGS.items():
        slots = stage_config(kind, BASES[kind]).inputs()
        words = {WRITTEN.get(slot, slot) for slot in slots}
        for path, annotation in leaves(model):
            if kind in OWN_FIELDS and path.split(".")[0] not in OWN_FIELDS[kind]:
                continue
            if path in words:
                moved.append(Case(kind, path, None, swap=True))
                continue
            if path.startswith("lag.") or path == "stream_gradients":  # need two pools: test_engine_{lag,streaming}.py
                continue
            if path.startswith("observe_"):  # need an algorithm that observes: test_train_job_wiring.py
                continue
            if path == "reward_model":  # in the place of `reward`
                moved.append(Case(kind, path, "reward_model", alone={"reward": None}))
                continue
            if path == "adapter.lora.dropout" and not getattr(model, "dropout", False):  # refused
                continue
            if path == "adapter.quantize":  # needs bitsandbytes: ecosystem/test_quantised.py
                continue
            adapter = {"adapter": ADAPTER} if path.startswith("adapter.") else {}
            options = choices(annotation)
            for value in options:
                key = known(UNMOVED, kind, f"{path}={value}")
                if value == pick(normal(kind), path):
                    continue
                if key:
                    unmoved.append(Case(kind, path, value))
                else:
                    moved.append(Case(kind, path, value, adapter | BESIDE.get(f"{kind} {path}={value}", {})))
            if options:
                continue
            at, still = known(VALUES, kind, path), known(UNMOVED, kind, path)
            if at:
                beside = {"early_stopping": STOPS} if path.startswith("early_stopping.") else {}
                beside |= adapter | ({"placement": APART} if path == "lag" else {})
                moved.append(Case(kind, path, VALUES[at], beside, alone=ALONE.get(path, {})))
            elif still:
                unmoved.append(Case(kind, path, UNMOVED_VALUES[still]))
            else:
                forgotten.append(f"{kind}: {path}")
    return moved, unmoved, forgotten


MOVED, UNMOVED_CASES, FORGOTTEN = cases()
SLOW = ("reward_model", "ppo", "dataflow", *OWN_FIELDS)  # beside sft and grpo


def tried(case: Case) -> Any:
    """Kinds that share most of their fields with another one are among the slow tests."""
    return pytest.param(case, marks=[pytest.mark.slow] if case.kind in SLOW else [])


def changed(kind: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = json.loads(json.dumps(normal(kind)))
    for path, value in changes.items():
        *way, last = path.split(".")
        if way and not pick(params, ".".join(way)):  # left out at its default
            params[way[0]] = {}
        (pick(params, ".".join(way)) if way else params)[last] = copy.deepcopy(value)
    return {key: value for key, value in params.items() if key != "steps" or not params.get("epochs")}


class Shop:
    """Inputs, and the results of stages by their parameters."""

    def __init__(self, root: Path) -> None:
        self.root, self.blobs, self.count = root, open_blobs(root / "blobs"), 0
        self.found: dict[str, str] = {}
        rows = [{"prompt": f"Q:{i}", "completion": f"A:{i % 3}", "answer": str(i % 3)} for i in range(6)]
        asked = [{"prompt": f"Q:{i}", "answer": letter} for i, letter in enumerate(LETTERS)]
        pairs = [{"prompt": f"Q:{i}", "chosen": f"A:{i}", "rejected": f"s{i}"} for i in range(6)]
        labels = [{"prompt": f"Q:{i}", "completion": f"A:{i % 4}", "label": i % 3 > 0} for i in range(6)]
        self.inputs = {name: self.put(name, found) for name, found in {
            "data": _lines(rows), "pairs": _lines(pairs), "probe": _lines(asked), "reward": "even",
            "held_out": _lines(rows), "held_pairs": _lines(pairs), "labels": _lines(labels),
        }.items()}  # fmt: skip
        self.others = {name: self.put(name, found) for name, found in {
            "data": _lines(rows[2:]), "pairs": _lines(pairs[2:]), "probe": _lines(asked[:7]), "reward": "odd",
            "held_out": _lines(rows[3:]), "held_pairs": _lines(pairs[3:]), "labels": _lines(labels[2:]),
        }.items()}  # fmt: skip
        meta = {"source": "best_of_n_case.py", "entry": "BestOfN"}
        self.inputs["recipe"] = self.put("recipe", FLOW, **meta)
        self.others["recipe"] = self.put("recipe", _spending_more(FLOW), **meta | {"source": "best_of_n_other.py"})
        for seed, shelf in enumerate((self.inputs, self.others)):
            folder = self.run("init_model", normal("init_model"), {}, seed)
            shelf["model"] = InputBlob(put_tree(self.blobs, folder.outputs / "model"), "tree", "model:tiny@1")
        self.inputs["teacher"], self.others["teacher"] = self.others["model"], self.inputs["model"]
        slots = {"model": "model", "data": "pairs", "probe": "held_pairs"}
        folder = self.run("reward_model", changed("reward_model", {}), slots, 0)
        self.inputs["reward_model"] = InputBlob(put_tree(self.blobs, folder.outputs / "model"), "tree", "model:judge@1")

    def put(self, name: str, text: str, **meta: str) -> InputBlob:
        return InputBlob(self.blobs.put(text.encode()), "file", f"asset:{name}@1", {"text": text[:4], **meta})

    def run(
        self, kind: str, params: Mapping[str, Any], slots: Mapping[str, str], seed: int, swapped: str = ""
    ) -> AttemptFolder:
        self.count += 1
        folder = AttemptFolder(self.root / f"{self.count}")
        shelf = {slot: (self.others if slot == swapped else self.inputs)[name] for slot, name in slots.items()}
        named = NativeTrainer().check(kind, params).params
        order = JobOrder(f"{self.count}", kind, seed, named, shelf, self.blobs.url, str(self.root / "cache"))
        folder.write_order(order)
        assert entry.run(str(folder.path), BODIES.get(kind, training.body)) == 0
        return folder

    def result(self, kind: str, changes: Mapping[str, Any], swapped: str = "") -> str:
        """Digest of everything that a stage leaves and says, but for times and traces."""
        key = digest_json([kind, dict(changes), swapped])
        if key not in self.found:
            params = changed(kind, changes)
            slots = {slot: _shelf(kind, slot) for slot in stage_config(kind, params).inputs()}
            ARGUMENTS.clear()
            self.found[key] = _digest(self.run(kind, params, slots, 3, swapped))
        return self.found[key]


ARGUMENTS: list[str] = []  # what the reward was opened with


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _spending_more(flow: str) -> str:
    """The same flow, which tells of one more number."""
    more = "return {**_First.report(self, groups), 'more': 1.0}"
    return flow + f"\n\n_First = BestOfN\n\n\nclass BestOfN(_First):\n    def report(self, groups):\n        {more}\n"


def _shelf(kind: str, slot: str) -> str:
    name = slot.removeprefix("suites.")
    learnt = {**dict.fromkeys(("reward_model", "dpo", "orpo", "simpo"), "pairs"), "kto": "labels"}.get(kind, "data")
    if (kind == "sft" or learnt != "data") and name == "probe":  # other rows of what is learnt; kto also learns pairs
        return "held_out" if kind == "sft" else "held_pairs"
    return {"rewards.held": "reward", "held": "probe", "data": learnt}.get(name, name)


TIMES_AND_TRACES = (*CONTROLLER_METRICS, "trace/dropped")


def _digest(folder: AttemptFolder) -> str:
    result = folder.read_result()
    assert result is not None
    told = [
        {name: value for name, value in fact.values.items() if name not in TIMES_AND_TRACES}
        for fact in folder.facts()[0]
        if isinstance(fact, Metric)
    ]
    written = sorted(p for p in folder.outputs.rglob("*") if p.is_file()) if folder.outputs.is_dir() else []
    failure = result.failure.message if result.failure else None
    files = {p.relative_to(folder.path).as_posix(): digest_bytes(p.read_bytes()) for p in written}
    said = [result.status, result.message, failure, result.tokens, json.dumps(told)]
    return digest_json([*said, files, [*ARGUMENTS]])


def _planned(kind: str, changes: Mapping[str, Any]) -> str:
    contract = NativeTrainer().check(kind, changed(kind, changes))
    return repr((contract.load, contract.length))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    def opened(path: Path, entry: str | None = None, **options: Any) -> ScriptedReward:
        odd = path.read_text(encoding="utf-8") == "odd"
        ARGUMENTS.append(f"timeout {options['timeout']}")

        def score(call: RewardCall) -> list[float]:
            """Equal in the groups of one prompt, so that not every group has a signal."""
            shares = [sum(t % 2 == odd for t in tokens) / max(len(tokens), 1) for tokens in call.completion_ids]
            return [1.0 if p.endswith("3") else s for p, s in zip(call.prompts, shares, strict=True)]

        return ScriptedReward(score)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.jobs.bodies.rewards.open_reward", opened)
        patch.setattr("os.fsync", lambda handle: None)  # most of the time of so small a stage
        yield Shop(tmp_path_factory.mktemp("reaches"))


def test_no_field_was_forgotten() -> None:
    """Add its other value to VALUES, or why it changes nothing to UNMOVED."""
    assert FORGOTTEN == []
    used = {key for case in MOVED + UNMOVED_CASES if (key := known(VALUES, case.kind, case.path))}
    assert set(VALUES) <= used  # nor is there a value for a field that is gone


@pytest.mark.parametrize("kind", BASES)
def test_the_bases_run(shop: Shop, kind: str) -> None:
    """A base that failed would be changed by nothing, or by everything."""
    slots = {slot: _shelf(kind, slot) for slot in stage_config(kind, normal(kind)).inputs()}
    result = shop.run(kind, normal(kind), slots, 3).read_result()
    assert result is not None
    assert result.failure is None


@pytest.mark.parametrize("case", [tried(c) for c in MOVED if c.path not in PLANNED], ids=str)
def test_a_field_that_claims_to_matter_changes_the_result(shop: Shop, case: Case) -> None:
    slot = next((slot for slot, path in WRITTEN.items() if path == case.path), case.path) if case.swap else ""
    changes = dict(case.beside) if case.swap else {**case.beside, **case.alone, case.path: case.value}
    assert shop.result(case.kind, changes, slot) != shop.result(case.kind, dict(case.beside))


@pytest.mark.parametrize("case", [c for c in MOVED if c.path in PLANNED], ids=str)
def test_a_field_of_placement_changes_the_plan(case: Case) -> None:
    assert _planned(case.kind, {**case.beside, case.path: case.value}) != _planned(case.kind, dict(case.beside))


@pytest.mark.parametrize("case", [tried(c) for c in UNMOVED_CASES if f"{c.path}={c.value}" not in SKIPPED], ids=str)
def test_a_field_that_by_design_does_not_matter_changes_nothing(shop: Shop, case: Case) -> None:
    assert shop.result(case.kind, {case.path: case.value}) == shop.result(case.kind, {})
