"""LoRA adapters in a loaded model: attaching them, their canonical names, and their files.

peft replaces the adapted linear layers in place (`inject_adapter_in_model`), so the model keeps its class, its decoder
layers and its head. Parameters have canonical names, which the same weights have without an adapter, and in peft's
files::

    module's parameter                                         canonical name
    model.layers.0.self_attn.q_proj.base_layer.weight          model.layers.0.self_attn.q_proj.weight
    model.layers.0.self_attn.q_proj.lora_A.default.weight      model.layers.0.self_attn.q_proj.lora_A.weight

A and B have the dtype of the base; the optimiser updates float32 copies of them. Everything but A, B and the head of a
value or reward model is frozen.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.domain.adapters import AUTO, CONFIG, FOLDER, HEAD, PREFIX, WEIGHTS, SavedAdapter
from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import InputError
from posttrain.engine.models.sharding import canonical_parameters
from posttrain.engine.settings import LoraConfig

_NAME = "default"  # peft's name of the one adapter
_ATTRIBUTE = "_posttrain_adapter"  # of a module: the description of its adapter


def attached(module: nn.Module) -> SavedAdapter | None:
    """Return the description of a module's adapter; None: it has none."""
    return getattr(module, _ATTRIBUTE, None)


def attach(module: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Add a new adapter to a module, in place: B is 0, so the module computes what it computed.

    Args:
        seed: the values of A are a function of it alone.

    Raises:
        InputError: peft is not installed; no layer has a targeted name, or the rank is above a layer's size.
    """
    declared = lora.described()
    targets = linear_layers(module) if declared.targets == AUTO else tuple(declared.targets)
    if _has_head(module):  # a critic has the setting of its policy, and no output head
        targets = tuple(one for one in targets if one != "lm_head") or targets
    saved = replace(declared, targets=targets, scores=_has_head(module))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(module, saved, lora.dropout)


def attach_saved(module: PreTrainedModel, folder: Path, *, dropout: float = 0.0) -> None:
    """Add the adapter in a model's folder to its module, in place.

    Raises:
        InputError: peft is not installed; the files are not a plain LoRA adapter of this module.
    """
    told = read_adapter(folder)
    begins = _has_head(module) and not told.scores  # the adapter of a policy, with which a critic begins
    with torch.random.fork_rng(devices=[]):  # peft initialises what the file then replaces
        _inject(module, replace(told, scores=told.scores or begins), dropout)
    fill(module, folder, but_head=begins)


def fill(module: PreTrainedModel, folder: Path, *, but_head: bool = False) -> None:
    """Give a module's adapter the values in a model's folder.

    Args:
        but_head: whether the module's head keeps its values.

    Raises:
        InputError: the files are not the adapter of this module.
    """
    path = folder / FOLDER / WEIGHTS
    try:
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path).items()}
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"adapter {path} cannot be read: {error}; add the adapter again") from error
    own = {name: p for name, p in trained_parameters(module) if not (but_head and name.startswith(f"{HEAD}."))}
    wanted = {name: tuple(p.shape) for name, p in own.items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if odd := sorted(set(wanted.items()) ^ set(given.items())):
        name = odd[0][0]
        raise InputError(
            f"adapter {path} must fit its base: {name} has shape {list(given.get(name, ())) or 'none'}, the base needs "
            f"{list(wanted.get(name, ())) or 'none'}; add the adapter with the base that it was trained on"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def base_layer(layer: nn.Module) -> Any:
    """Return the base of a layer that may have an adapter."""
    return getattr(layer, "base_layer", layer)


def adapter_weights(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return A and B of a layer, [rank, inputs] and [outputs, rank]; None: it has no adapter."""
    if not hasattr(layer, "lora_A"):
        return None
    low, high = (getattr(layer, name)[_NAME].weight.detach() for name in ("lora_A", "lora_B"))
    return low, high


def head_adapter(layer: Any, saved: SavedAdapter) -> tuple[nn.Linear, Tensor, float] | None:
    """Return the layer of A, B and the scale of an output head's adapter, which learn; None: it has none."""
    if not hasattr(layer, "lora_A"):
        return None
    return layer.lora_A[_NAME], layer.lora_B[_NAME].weight, saved.scale


def read_adapter(folder: Path) -> SavedAdapter:
    """Return the description of the adapter in a model's folder.

    Raises:
        InputError: it cannot be read, or is more than plain LoRA.
    """
    path = folder / FOLDER / CONFIG
    try:
        found = SavedAdapter.from_json(json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError) as error:
        raise InputError(f"adapter {path} cannot be read: {error}; add the adapter again") from error
    if isinstance(found.targets, str):
        raise InputError(f"{path}: target_modules must be a list, got {found.targets!r:.60}; add the adapter again")
    return found


def in_folder(folder: Path) -> bool:
    """Return whether a model's folder has an adapter."""
    return (folder / FOLDER / CONFIG).is_file()


def write_adapter(module: nn.Module, folder: Path, gathered: Mapping[str, Tensor] | None = None) -> None:
    """Write a module's adapter below a model's folder, in peft's format. Equal weights are written as equal bytes.

    Args:
        gathered: whole tensors by canonical name to write instead of the module's.
    """
    saved = attached(module)
    assert saved is not None, "the module has an adapter"
    own = dict(trained_parameters(module)) if gathered is None else gathered
    tensors = {f"{PREFIX}{name}": tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in own.items()}
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / WEIGHTS, metadata={"format": "pt"})
    (place / CONFIG).write_bytes(canonical_json(saved.to_json()))


def trained_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module that learn, by canonical name."""
    return ((name, p) for name, p in canonical_parameters(module) if p.requires_grad)


def linear_layers(module: PreTrainedModel) -> tuple[str, ...]:
    """Return the names, within their parents, of all linear layers of a model's decoder layers.

    Raises:
        InputError: the decoder layers of the model cannot be found.
    """
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(
            f"adapter.lora.targets: auto needs a list of decoder layers, got {type(module).__name__}; name the layers"
        )
    named = {name.rpartition(".")[2] for name, part in layers.named_modules() if isinstance(part, nn.Linear)}
    return tuple(sorted(named))


def merge(module: PreTrainedModel) -> PreTrainedModel:
    """Add every B A to its base weight, in place, and remove the adapter; return the module.

    The sums are computed in float32 (float64 for float64) and rounded once to the base's dtype. A tied head with an
    adapter is untied.
    """
    saved = attached(module)
    assert saved is not None, "the module has an adapter"
    with torch.no_grad():
        for name, part in list(module.named_modules()):
            if (found := adapter_weights(part)) is None:
                continue
            base, (low, high) = base_layer(part), found
            if base.weight is module.get_input_embeddings().weight:  # a head of its own, because only its sum changes
                base.weight = nn.Parameter(base.weight.detach().clone())
                module.config.get_text_config().tie_word_embeddings = module.config.tie_word_embeddings = False
            precise = torch.promote_types(base.weight.dtype, torch.float32)
            base.weight.copy_(base.weight.to(precise) + saved.scale * (high.to(precise) @ low.to(precise)))
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, base)
    delattr(module, _ATTRIBUTE)
    return module


def _has_head(module: nn.Module) -> bool:
    return isinstance(getattr(module, HEAD, None), nn.Linear)


def _inject(module: PreTrainedModel, saved: SavedAdapter, dropout: float) -> None:
    """Replace the targeted layers, and freeze everything but the adapter and the head of a scalar model."""
    peft = _peft()
    wanted = peft.LoraConfig(
        r=saved.rank,
        lora_alpha=saved.alpha,
        lora_dropout=dropout,
        target_modules=list(saved.targets),
        use_rslora=saved.rslora,
        bias="none",
    )
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    saved.refuse_unfit({name: min(part.in_features, part.out_features) for name, part in linear.items()})
    try:
        peft.inject_adapter_in_model(wanted, module, adapter_name=_NAME)
    except ValueError as error:
        raise InputError(f"adapter.lora.targets: {str(error).splitlines()[0]}") from error
    if saved.scores:
        module.get_submodule(HEAD).requires_grad_(True)
    setattr(module, _ATTRIBUTE, saved)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError(
            "a model with an adapter needs the package peft, which is not installed here; pip install 'posttrain[lora]'"
        ) from error
    return peft
