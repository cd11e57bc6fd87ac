"""Writes the weights of a model folder in another floating-point type, in place, shard by shard.

Request: `{"folder", "dtype", "merge"}`. Answer: `{"file", "tensors", "dtype"}` for each file. One shard is in memory at
a time. A finite number that is not finite after the conversion is an error, since a model with an infinite weight is
useless. With `merge`, the folder's adapter is added to its base first, in the base's type; the whole model is then in
memory.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from posttrain.domain.adapters import FOLDER
from posttrain.domain.errors import InputError
from posttrain.store.atomic import write_json

_LEAST_BYTES = 2  # bytes of the smallest plain floating-point type
_INDEX = "model.safetensors.index.json"


def cast(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Convert every safetensors file of the folder, then update type and size in the configuration and the index."""
    folder, given = Path(request["folder"]), request["dtype"]
    if request.get("merge"):
        yield from _merged(folder, given)
        return
    name = str(given)
    dtype: torch.dtype = getattr(torch, name)
    size = 0
    for path in sorted(folder.rglob("*.safetensors")):
        tensors = {key: _as(value, dtype, key) for key, value in load_file(path).items()}
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {"format": "pt"}
        save_file(tensors, path.with_suffix(".new"), metadata=metadata)
        shutil.copymode(path, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        yield {"file": path.relative_to(folder).as_posix(), "tensors": len(tensors), "dtype": name}
    if (folder / "config.json").is_file():  # not beside an adapter alone
        _name_type(folder / "config.json", name)
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_bytes())
        index["metadata"] = {**index.get("metadata", {}), "total_size": size}
        write_json(folder / _INDEX, index)


def _merged(folder: Path, given: str | None) -> Iterator[Mapping[str, Any]]:
    """Replace the weights of a base by their sums with the adapter, in the type `given` or in that of the base.

    Raises:
        InputError: the base is stored quantised, or a weight or a sum is not finite in the type.
    """
    from posttrain.engine.models.adapters import merge
    from posttrain.engine.models.files import is_sequence_classifier, load_model, load_scalar_model, save_model

    files = [path for path in folder.glob("*.safetensors*") if path.is_file()]
    config = json.loads((folder / "config.json").read_bytes())
    if config.get("quantization_config"):
        raise InputError("an adapter cannot be merged into a quantised base; export it with --adapter")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    kind = given or stored
    load = load_scalar_model if is_sequence_classifier(folder) else load_model
    model = load(folder, dtype=stored)
    for name, weight in merge(model.module).to(getattr(torch, kind)).state_dict().items():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            wider = "export bfloat16 or float32, or --adapter" if kind == "float16" else "export --adapter"
            raise InputError(f"{name}: not every weight is finite in {kind}; {wider}")
    for path in files:
        path.unlink()
    shutil.rmtree(folder / FOLDER)
    save_model(model, None, folder)
    for path in sorted(folder.glob("*.safetensors")):
        shutil.copymode(folder / "config.json", path)
        with safe_open(path, "pt") as file:
            yield {"file": path.name, "tensors": len(file.keys()), "dtype": kind}


def _as(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    if tensor.element_size() < _LEAST_BYTES:
        raise InputError(f"{name}: is quantised ({tensor.dtype}), which cannot be converted; export it without --dtype")
    other = tensor.to(dtype)
    if bool((other.isfinite() != tensor.isfinite()).any()):
        most, kind = float(tensor[tensor.isfinite()].abs().max()), str(dtype).removeprefix("torch.")
        raise InputError(
            f"{name}: its largest weight, {most:.4g}, is outside the range of {kind}; export bfloat16 or float32"
        )
    return other


def _name_type(path: Path, name: str) -> None:
    """Write the type into the configuration and its `text_config`."""
    config = json.loads(path.read_bytes())
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["torch_dtype" if "torch_dtype" in part else "dtype"] = name
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
