"""Reading and writing models and tokenizers: local folders in the Hugging Face format, safetensors only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.domain.errors import InputError, NotFoundError
from posttrain.engine.models.language_model import LanguageModel, adopt_module

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load_model(folder: Path, *, device: str = "cpu", dtype: str = "float32") -> LanguageModel:
    """Load a causal language model and check its capabilities. No network, no pickle, no code from the folder.

    Args:
        dtype: float32, bfloat16, float16 or float64.

    Raises:
        NotFoundError: no such folder, or no `config.json` in it.
        InputError: weights that are not safetensors, an unknown dtype, a device that is not there, or an
            architecture that is not a causal language model of transformers.
    """
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise InputError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device must exist, got {device!r} but torch finds no CUDA device; use device cpu")
    _check_folder(folder)
    if not any(folder.glob("*.safetensors")):
        found = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        raise InputError(
            f"weights in {folder} must be *.safetensors, got {', '.join(found) or 'none'}; convert them first"
        )
    try:
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=kind
        )
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"model in {folder} cannot be loaded: {_first_line(error)}; check its config.json and weights"
        ) from error
    return adopt_module(module.to(device))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder, running no code from it.

    Raises:
        NotFoundError: no such folder.
        InputError: no tokenizer that transformers can read.
    """
    if not folder.is_dir():
        raise NotFoundError(f"tokenizer folder must exist, got {folder}; check the path")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise InputError(
            f"tokenizer in {folder} cannot be loaded: {_first_line(error)}; check tokenizer.json"
        ) from error
    # How it was loaded would otherwise be saved with it, and change the bytes.
    for argument in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(argument, None)
    return tokenizer


def save_model(model: LanguageModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write weights, configuration and tokenizer. The same weights give the same bytes.

    Args:
        folder: created when missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.module.save_pretrained(folder, state_dict=_detached_state(model.module))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def copy_weights(model: LanguageModel) -> dict[str, Tensor]:
    """A copy of every weight by name, tied weights once, each tensor with memory of its own (fit for safetensors)."""
    seen: set[tuple[int, torch.Size]] = set()
    copies: dict[str, Tensor] = {}
    for name, tensor in model.module.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in seen:
            seen.add(place)
            copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copies


def restore_weights(model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
    """Write weights into the model in place, so that optimisers and zero-copy decoders keep looking at them.

    Raises:
        InputError: names or shapes other than `copy_weights` gives for this model.
    """
    own = {name: tensor for name, tensor in model.module.state_dict().items() if name in weights}
    missing = set(copy_names(model)) ^ set(weights)
    wrong = [name for name, tensor in own.items() if tensor.shape != weights[name].shape]
    if missing or wrong:
        first = min(missing | set(wrong))
        raise InputError(f"weights must fit the model, got a mismatch at {first}; load them into their own model")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def copy_names(model: LanguageModel) -> list[str]:
    """The names `copy_weights` gives, without copying."""
    places: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in model.module.state_dict().items():
        places.setdefault((tensor.data_ptr(), tensor.shape), name)
    return list(places.values())


def _detached_state(module: PreTrainedModel) -> dict[str, Any]:
    """Clones that share memory only where weights are tied: a zero-copy decoder lays parameters in one buffer."""
    clones: dict[tuple[int, torch.Size], Tensor] = {}
    state: dict[str, Any] = {}
    for name, tensor in module.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in clones:
            clones[place] = tensor.detach().clone(memory_format=torch.contiguous_format)
        state[name] = clones[place]
    return state


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise NotFoundError(f"model folder must hold a config.json, got {folder}; check the path")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
