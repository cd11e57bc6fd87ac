"""LoRA adapters: what run.yaml declares, what peft stores, and how a model with an adapter is stored.

A model with an adapter is a folder with the files of its base and a folder `adapter/` in peft's format::

    config.json  model.safetensors  tokenizer.json  …      the base, unchanged
    adapter/adapter_config.json                            rank, alpha, targets (`SavedAdapter`)
    adapter/adapter_model.safetensors                      A and B of every adapted layer, and a trained score head

In the store, such a folder is a tree whose listing names the blobs of the base, so a stage stores the files of its
adapter only (`extended`). The tree's digest covers both; the digest of the base is that of the listing without
`adapter/` (`base_files`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.domain.errors import InputError, IntegrityError

FOLDER = "adapter"  # in the folder of a model
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of peft's names of tensors
HEAD = "score"  # the head of a value or reward model, which trains in full beside its adapter
MOST_RANK, MOST_ALPHA = 4096, 1e6
AUTO = "auto"  # targets: all linear layers of the decoder layers
F = TypeVar("F")
_PLAIN = {"peft_type": "LORA", "bias": "none"}
_NEUTRAL = {  # settings of peft that do not change what a plain adapter computes, or are read below
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r"),
    *("target_modules", "lora_alpha", "lora_dropout", "use_rslora", "modules_to_save", "init_lora_weights"),
    *("layers_pattern", "megatron_core", "qalora_group_size", "loftq_config", "ensure_weight_tying", "runtime_config"),
}
_ALTERS_BASE = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga")  # initialisations that change the base's weights


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """An adapter as its `adapter_config.json` describes it."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]  # a text is `auto`, or a pattern of a file of peft, which `asset add` replaces
    rslora: bool = False
    scores: bool = False  # whether it has a head that scores responses

    @property
    def scale(self) -> float:
        """The factor s of the update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @classmethod
    def from_json(cls, value: Any, where: str) -> SavedAdapter:
        """Read a configuration of peft.

        Args:
            where: the file's name in errors.

        Raises:
            InputError: it is not a configuration of peft, or is more than plain LoRA on linear layers.
        """
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: must be a configuration of peft, got {type(value).__name__}; name another file")
        for name, found in value.items():
            plain = _PLAIN.get(name)
            if name not in _NEUTRAL and found != plain and (plain or found):
                raise InputError(
                    f"{where}: {name:.40} must be {plain or 'unset'}, since only plain LoRA is supported, got "
                    f"{found!r:.60}; merge the adapter into its base with peft and add the merged model"
                )
        started = value.get("init_lora_weights")
        if isinstance(started, str) and started.lower().startswith(_ALTERS_BASE):
            raise InputError(
                f"{where}: init_lora_weights {started} changes the base's weights; convert the adapter to plain LoRA "
                "with peft's save_pretrained(path_initial_model_for_weight_conversion=…)"
            )
        whole = value.get("modules_to_save") or []
        if whole not in ([], [HEAD]):
            raise InputError(
                f"{where}: modules_to_save may name {HEAD} only, got {whole!r:.60}; merge the adapter into its base "
                "with peft and add the merged model"
            )
        rank: Any = value.get("r")
        alpha: Any = value.get("lora_alpha")
        targets = value.get("target_modules")
        named = isinstance(targets, list) and targets and all(isinstance(one, str) for one in targets)
        known = type(rank) is int and type(alpha) in (int, float) and type(value.get("use_rslora", False)) is bool
        if not (known and 1 <= rank <= MOST_RANK and 0 < alpha <= MOST_ALPHA):
            raise InputError(
                f"{where}: r must be from 1 to {MOST_RANK}, lora_alpha above 0 and at most {MOST_ALPHA:g}, and "
                f"use_rslora true or false, got {rank!r:.20}, {alpha!r:.20} and {value.get('use_rslora')!r:.20}; save "
                "the adapter again with peft"
            )
        if not (named or (isinstance(targets, str) and targets)):
            raise InputError(
                f"{where}: target_modules must name linear layers, got {targets!r:.60}; save the adapter again with "
                "peft"
            )
        told = tuple(sorted(targets)) if isinstance(targets, list) else str(targets)
        return cls(rank, float(alpha), told, bool(value.get("use_rslora")), bool(whole))

    def to_json(self) -> dict[str, Any]:
        """Return the configuration in peft's words, without the name of a base, which only an export has."""
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self.scores else "CAUSAL_LM",
            "base_model_name_or_path": None,
            "bias": "none",
            "inference_mode": True,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": [HEAD] if self.scores else None,
            "r": self.rank,
            "target_modules": list(self.targets) if isinstance(self.targets, tuple) else self.targets,
            "use_rslora": self.rslora,
        }

    def refuse_other(self, declared: SavedAdapter, name: str) -> None:
        """Raise InputError if a stage that continues this adapter declares another one."""
        for word in ("rank", "alpha", "rslora", *(("targets",) if declared.targets != AUTO else ())):
            has, declares = getattr(self, word), getattr(declared, word)
            if has != declares:
                raise InputError(
                    f"model {name} has an adapter of {word} {_said(has)}, which the stage continues, but it declares "
                    f"{word} {_said(declares)}; write {self.written}, or train on a merged model (posttrain export "
                    "--merged, posttrain asset add)"
                )

    def refuse_unfit(self, layers: Mapping[str, int]) -> None:
        """Raise InputError if a target names no layer of a model, or the rank is above a layer's size.

        Args:
            layers: the model's linear layers by name, each with the smaller of its two sizes.
        """
        of_layers = sorted({name.rpartition(".")[2] for name in layers if ".layers." in name})
        for target in of_layers if self.targets == AUTO else self.targets:
            found = {name: size for name, size in layers.items() if name == target or name.endswith(f".{target}")}
            if not found:
                known = ", ".join(of_layers)
                raise InputError(f"adapter.lora.targets: no linear layer is named {target}; the model has {known}")
            if self.rank > (most := min(found.values())):
                raise InputError(
                    f"adapter.lora.rank must be at most {most}, the size of {target}, got {self.rank}; lower it, or "
                    f"name targets without {target}"
                )

    @property
    def written(self) -> str:
        """The adapter as a stage declares it."""
        fields = {"rank": self.rank, "alpha": self.alpha, "targets": self.targets, "rslora": self.rslora}
        lora = ", ".join(f"{word}: {_said(value)}" for word, value in fields.items())
        return f"adapter: {{lora: {{{lora}}}}}"

    def refuse_whole_training(self, name: str) -> None:
        """Raise InputError: a stage would train a whole model that has this adapter."""
        raise InputError(
            f"model {name} has an adapter, but the stage trains whole models; add {self.written} to the stage, or "
            "train on a merged model (posttrain export --merged, posttrain asset add)"
        )


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def is_linear(name: str) -> bool:
    """Return whether a stored matrix may be the weight of a linear layer.

    A model's experts and routers are left out, because transformers makes no linear layers of them.
    """
    other = ".experts." in name or "embed" in name or name.endswith((".gate.weight", ".router.weight"))
    return name.endswith(".weight") and not other


def base_files(files: Mapping[str, F]) -> dict[str, F]:
    """Return the files of a model without those of its adapter."""
    return {name: file for name, file in files.items() if not name.startswith(f"{FOLDER}/")}


def has_adapter(files: Mapping[str, Any]) -> bool:
    """Return whether a model's folder has an adapter."""
    return f"{FOLDER}/{CONFIG}" in files


def extended(base: Mapping[str, F], added: Mapping[str, F]) -> dict[str, F]:
    """Return the files of a model with an adapter: those of `base` without any earlier adapter, and those of `added`.

    Raises:
        IntegrityError: a file of `added` is not a file of an adapter, or one is missing.
    """
    wanted = {f"{FOLDER}/{CONFIG}", f"{FOLDER}/{WEIGHTS}"}
    if added.keys() != wanted:
        raise IntegrityError(
            f"an adapter must consist of {', '.join(sorted(wanted))}, got {', '.join(sorted(added))[:200]}"
        )
    return {**base_files(base), **added}


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """The size of an adapter, for the planner."""

    rank: int
    targets: tuple[str, ...] = ()  # empty: all linear layers of the decoder layers
    quantised: bool = False  # whether the base's linear layers are kept in 4 bits

    def parameters(self, layer: Mapping[str, tuple[int, int]], layers: int) -> int:
        """Return the number of an adapter's parameters.

        Args:
            layer: name → outputs and inputs of each linear layer of one decoder layer.
            layers: number of decoder layers.
        """
        named = {one.rpartition(".")[2] for one in self.targets}  # the name of one layer counts as that of all
        chosen = [shape for name, shape in layer.items() if not named or name in named]
        return layers * sum(self.rank * (rows + columns) for rows, columns in chosen)
