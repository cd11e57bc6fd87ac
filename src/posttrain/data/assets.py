"""Inspection of a reward or a model before it is registered, without running any of its code.

Each `inspect_…` function returns the asset's `meta`, a JSON map for people and plans. Reward sources are parsed, never
executed; the sizes of model weights are read from the headers of the weights' files.
"""

import ast
import json
import math
import re
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from posttrain.data.refs import (
    SOURCE,
    WORD,
    Function,
    ImportedReward,
    definitions,
    functions,
    rubrics,
    signature_of,
)
from posttrain.domain.adapters import CONFIG as ADAPTER, HEAD, PREFIX, WEIGHTS, SavedAdapter, is_linear
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import InputError, NotFoundError, nearest
from posttrain.domain.ports import BlobStore
from posttrain.domain.rewards import (
    AUTO,
    DIALECTS,
    Called,
    Signature,
    SignatureError,
    detect,
    entry_name,
    refuse_missing,
    refuse_nameless,
    source_name,
)
from posttrain.store.trees import TreeFile, beside_model

Meta = dict[str, Any]
REWARD_DIALECTS = (AUTO, *DIALECTS)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_SIZES = (  # fields of config.json that must be positive whole numbers
    *("max_position_embeddings", "n_positions", "n_ctx", "vocab_size", "hidden_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
)
_PICKLED = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))  # first bytes of a pickle, by protocol
_LINEAGE = "lineage.json"  # of an exported adapter
_MAX_HEADER = 100 * 2**20  # maximum bytes of the JSON header of a safetensors file

# --- rewards ----------------------------------------------------------------------------------------------------------


def inspect_reward(
    path: Path, entry: str | None = None, *, dialect: str = "auto", guideline: Path | None = None
) -> Meta:
    """Return `{"entry", "dialect", "parameters", "async", "source", "source_digest", "guideline"}` of a reward.

    Args:
        path: a Python file, or a folder that contains the file.
        entry: `function` or `file.py:function`; None: `score`, `compute_score` or the only public function.
        dialect: the calling convention, for parameter names that are ambiguous.
        guideline: a text file that describes the rewarded behaviour; None: the docstring of the function or module.

    Raises:
        NotFoundError: there is no such source, function or guideline file.
        InputError: the source is not Python (`file:line`), the entry is unclear, or the dialect is unknown.
    """
    if dialect not in REWARD_DIALECTS:
        raise InputError(f"dialect must be one of {', '.join(REWARD_DIALECTS)}, got {dialect!r}")
    file, _, function = (entry or "").rpartition(":")
    source = _reward_source(path, file)
    data = source.read_bytes()
    module, name, node, signature = _callable(data, source.name, function, dialect)
    text = _guideline_text(guideline) if guideline else (node and ast.get_docstring(node)) or ast.get_docstring(module)
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{source.name}: its docstring must be valid Unicode, got a lone surrogate; remove it"
        ) from error
    return {
        "entry": f"{source.name}:{name}" if path.is_dir() else name,
        "dialect": dialect,
        "parameters": [] if isinstance(signature, str) else signature.words(),
        "async": isinstance(node, ast.AsyncFunctionDef),
        "source": source.name,
        "source_digest": digest_bytes(data),
        "guideline": text or "",
    }


def inspect_imported(found: ImportedReward, called: Called) -> Meta:
    """Return `{"entry", "dialect", "source"}` for a reward in an installed package.

    Raises:
        InputError: the function has parameters that its dialect, or every dialect, cannot provide, or `called` names a
            function although the ref already names one.
    """
    word, dialect = f"{found.module}:{found.function}", called.dialect or AUTO
    if called.entry is not None:
        raise InputError(
            f"entry must not be set with {word}, which names the function, got {called.entry!r}; remove it"
        )
    if not isinstance(found.signature, str):
        _refuse_unknown(found.signature, dialect, word)
    return {"entry": found.function, "dialect": dialect, "source": SOURCE}


def inspect_called(data: bytes, source: str, function: str, dialect: str, *, whole: bool) -> Meta:
    """Return `{"entry", "dialect", "source"}` for a function of a stored reward; a run file names the function.

    Args:
        data: the bytes of the file `source`.
        function: the function's name; if it is "", the conventional function is used.
        whole: whether the reward is a folder, whose entry must also name the file.

    Raises:
        InputError: the source is not Python, the entry is unclear, or the dialect cannot provide the parameters.
        NotFoundError: there is no such function; the message lists the existing functions.
    """
    _, name, _, _ = _callable(data, source, function, dialect)
    return {"entry": f"{source}:{name}" if whole else name, "dialect": dialect, "source": source}


def _callable(
    data: bytes, source: str, function: str, dialect: str
) -> tuple[ast.Module, str, Function | None, Signature | str]:
    """Return the module of a reward, and the name, definition and parameters of the reward's function."""
    module = _parsed(data, source)
    name, node = _entry_node(module, function, source)
    signature = signature_of(module, name)
    if not isinstance(signature, str):
        place = f"{source}{f':{node.lineno}' if node else ''} ({name})"
        others = [other for other in functions(module) if other != name and not other.startswith("_")]
        _refuse_unknown(signature, dialect, place, f"; {source} also defines {', '.join(others)}" if others else "")
    return module, name, node, signature


def _refuse_unknown(signature: Signature, dialect: str, place: str, others: str = "") -> None:
    """Reject a signature that a job's worker would reject, or that no data set could satisfy."""
    try:
        refuse_nameless(signature)
        if dialect == AUTO:
            detect(signature)
        elif not DIALECTS[dialect].columns:
            refuse_missing(signature, dialect, ())
    except SignatureError as error:
        told = "" if dialect == AUTO else f" (dialect {dialect})"
        raise InputError(f"{place}{told}: {error}{others}") from error


def reward_signature(data: bytes, source: str, entry: str | None) -> tuple[str, Signature | str]:
    """Return the function of a reward's source that is called, and its parameters or why they are not known yet.

    Raises:
        InputError: the source is not Python, or the entry is unclear.
    """
    module = _parsed(data, source)
    name, _ = _entry_node(module, (entry or "").rpartition(":")[2], source)
    return name, signature_of(module, name)


def inspect_recipe(path: Path, entry: str) -> Meta:
    """Return `{"entry", "source"}` for a user's algorithm, whose file is parsed but never executed.

    Raises:
        NotFoundError: there is no such file or class.
        InputError: the source is not Python (`file:line`).
    """
    if not path.is_file():
        raise NotFoundError(f"recipe source {path} does not exist; put the module next to the run file")
    module = _parsed(path.read_bytes(), path.name)
    if entry not in definitions(module):
        classes = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
        near = nearest(entry, classes) if get_close_matches(entry, classes, cutoff=0.5) else ""
        raise NotFoundError(f"{path.name} has no class {entry!r}{near}; it defines {', '.join(classes) or 'none'}")
    return {"entry": entry, "source": path.name}


def _parsed(data: bytes, source: str) -> ast.Module:
    try:
        return ast.parse(data, filename=source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        line, reason = getattr(error, "lineno", None), str(error) or "nested too deeply for Python"
        raise InputError(f"{source}{f':{line}' if line else ''} is not valid Python: {reason}") from error


def _reward_source(path: Path, file: str) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        hint = "give a Python file or a folder that contains one"
        if WORD.fullmatch(str(path)):
            hint = (
                f"a function of a package needs no registration; name it in run.yaml, as in rewards: {{mine: {path}}}"
            )
        raise NotFoundError(f"reward source {path} does not exist; {hint}")
    return path / source_name({p.name for p in path.glob("*.py")}, file, path.name)


def _entry_node(module: ast.Module, entry: str, source: str) -> tuple[str, Function | None]:
    """Return the entry's name and its definition, which is None for a name that is imported or assigned."""
    known, own = definitions(module), functions(module)
    entry = entry or entry_name(own, source, rubrics(module), known.keys())
    if entry not in known:
        public = [name for name in (*own, *rubrics(module)) if not name.startswith("_")]
        near = nearest(entry, public) if get_close_matches(entry, public, cutoff=0.5) else ""
        raise NotFoundError(f"{source} has no function {entry!r}{near}; it defines {', '.join(public) or 'none'}")
    return entry, own.get(entry)


def _guideline_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise NotFoundError(f"guideline {path} does not exist; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"guideline {path} cannot be read as text: {error}") from error


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits on the contents of a model folder, not counting hidden files: `ModelLimits(files=20_000)`.

    Raises:
        InputError: a limit is below 1.
    """

    files: int = 10_000
    depth: int = 16  # maximum levels of nested folders
    bytes: int = 4 * 2**40

    def __post_init__(self) -> None:
        for name in ("files", "depth", "bytes"):
            if not _is_count(given := getattr(self, name)) or not given:
                raise InputError(f"model limit {name} must be a whole number from 1, got {given!r:.60}")


def model_limits(words: Sequence[str]) -> dict[str, int]:
    """Return the limits in arguments such as `files=20000`; the single argument `none` means the defaults.

    Raises:
        InputError: a limit is unknown, or its value is not a whole number from 1.
    """
    pairs = [word.partition("=")[::2] for word in words if words != ["none"]]
    if odd := next((one for one in pairs if one[0] not in ModelLimits.__slots__ or not one[1].isdecimal()), None):
        known = ", ".join(f"{name}=N" for name in ModelLimits.__slots__)
        raise InputError(f"init: --model-limit must be one of {known}, got {'='.join(odd)[:60]!r}")
    limits = {name: int(number) for name, number in pairs}
    ModelLimits(**limits)
    return limits


def inspect_model(folder: Path, limits: ModelLimits | None = None) -> Meta:
    """Return the `meta` of a model folder, without executing any of its code.

    Its keys are architecture, model_type, context_length (tokens), vocab_size, parameters, dtypes, tokenizer and
    chat_template.

    Args:
        folder: a model in Hugging Face format, with weights in safetensors.

    Raises:
        NotFoundError: there is no such folder, config.json or weights, or a shard is missing.
        InputError: the folder exceeds the limits, or contains pickled files at any depth, code to execute, overlapping
            tensors, or an unreadable config or header.
    """
    if not folder.is_dir():
        raise NotFoundError(f"model folder {folder} does not exist; check the path")
    _survey(folder, limits or ModelLimits())
    config = _json_file(folder / "config.json", folder.name)
    if "auto_map" in config:
        raise InputError(
            f"model {folder.name}: config.json requires code in the folder (auto_map), which Posttrain never executes"
        )
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise InputError(
            f"model {folder.name}: config.json: architectures must be a list of names, got {architectures!r:.60}"
        )
    if not architectures:
        raise InputError(f"model {folder.name}: config.json must name `architectures`, got none")
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise InputError(f"model {folder.name}: config.json: text_config must be a map, got {type(text).__name__}")
    _check_sizes(config, folder.name)
    _check_sizes(text, folder.name)
    tensors = [tensor for shard in _shards(folder) for tensor in _header(shard).values()]
    tokenizer = folder / "tokenizer_config.json"
    templated = (folder / "chat_template.jinja").is_file() or (
        tokenizer.is_file() and bool(_json_file(tokenizer, folder.name).get("chat_template"))
    )
    return {
        "architecture": architectures[0],
        "model_type": config.get("model_type", ""),
        "context_length": next(
            (text[k] for k in ("max_position_embeddings", "n_positions", "n_ctx") if text.get(k)), None
        ),
        "vocab_size": text.get("vocab_size"),
        "parameters": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "dtypes": sorted({tensor["dtype"] for tensor in tensors}),
        "tokenizer": any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json")),
        "chat_template": templated,
    }


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter in peft's format, and no whole model."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def inspect_adapter(
    folder: Path, base: str, digest: str, shapes: Mapping[str, Sequence[int]]
) -> tuple[SavedAdapter, dict[str, Any]]:
    """Return an adapter of a folder and its metadata, after checking that it fits its base.

    The targets of the result are names of layers, also where the folder has a pattern.

    Args:
        base: the base's name.
        digest: of the base.
        shapes: tensor of the base → its shape.

    Raises:
        InputError: the adapter is more than plain LoRA, was trained on another base, or has a weight that is missing,
            left over, of another shape or type, or not finite.
        NotFoundError: the folder has no weights in safetensors.
    """
    _survey(folder, ModelLimits())
    saved = SavedAdapter.from_json(_json_file(folder / ADAPTER, folder.name), f"{folder.name}/{ADAPTER}")
    if not (folder / WEIGHTS).is_file():
        raise NotFoundError(f"adapter {folder.name} has no {WEIGHTS}; save it with peft as safetensors")
    named = _json_file(folder / _LINEAGE, folder.name).get("base") if (folder / _LINEAGE).is_file() else None
    if named not in (None, digest):
        raise InputError(f"adapter {folder.name} was trained on {named}, got {base} ({digest}); name its base")
    header = _header(folder / WEIGHTS)
    own = {name.removeprefix(PREFIX): tensor["shape"] for name, tensor in header.items()}
    embeddings = [shape for name, shape in shapes.items() if "embed" in name and ".layers." not in name]
    linear = {name[: -len(".weight")]: shape for name, shape in shapes.items() if is_linear(name) and len(shape) == 2}
    linear |= {"lm_head": embeddings[0]} if embeddings and "lm_head" not in linear else {}  # a tied head is not stored
    adapted = {name.partition(".lora_")[0] for name in own if ".lora_" in name}
    if isinstance(saved.targets, str):
        saved = replace(saved, targets=_targets(adapted, linear))
    found = {layer for layer in linear for one in saved.targets if layer == one or layer.endswith(f".{one}")}
    wanted = {f"{layer}.lora_A.weight": [saved.rank, linear[layer][1]] for layer in found}
    wanted |= {f"{layer}.lora_B.weight": [linear[layer][0], saved.rank] for layer in found}
    heads = {f"{HEAD}.weight"} if saved.scores else set()
    odd = sorted(name for name in {*own, *wanted} - heads if own.get(name) != wanted.get(name))
    if odd or not found or heads - own.keys():
        name = odd[0] if odd else next(iter(heads - own.keys()), "every weight")
        raise InputError(
            f"adapter {folder.name} must fit {base} with its rank and targets: {name[:120]} has shape "
            f"{own.get(name) or 'none'}, expected {wanted.get(name) or 'none'}; name the model that it was trained on, "
            "or save the adapter again with peft"
        )
    _refuse_infinite(folder / WEIGHTS, header)
    parameters = sum(math.prod(tensor["shape"]) for tensor in header.values())
    return saved, {"base": base, "rank": saved.rank, "parameters": parameters, "scores": saved.scores}


def _targets(adapted: Collection[str], linear: Mapping[str, object]) -> tuple[str, ...]:
    """Return names for the adapted layers: last parts if all layers of these names are adapted, else whole names."""
    short = {layer.rpartition(".")[2] for layer in adapted}
    every = {layer for layer in linear if layer.rpartition(".")[2] in short}
    return tuple(sorted(short if every == adapted else adapted))


def _refuse_infinite(path: Path, header: Mapping[str, Any]) -> None:
    """Reject tensors that are not of floating type, or have a value that is not finite: its exponent has all bits."""
    import numpy as np  # a server does not load it

    data = np.memmap(path, np.uint8, "r")
    begin = 8 + struct.unpack("<Q", data[:8].tobytes())[0]
    for name, tensor in header.items():
        if tensor["dtype"] not in _EXPONENTS:
            raise InputError(
                f"adapter {path.parent.name}: {name[:120]} must have one of the types {', '.join(_EXPONENTS)}, got "
                f"{tensor['dtype']}; save the adapter again with peft"
            )
        kind, mask = _EXPONENTS[tensor["dtype"]]
        first, after = tensor["data_offsets"]
        if bool(((data[begin + first : begin + after].view(kind) & np.array(mask, kind)) == mask).any()):
            raise InputError(
                f"adapter {path.parent.name}: {name[:120]} must be finite, got NaN or infinity; train again"
            )


def shapes_on_disk(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors of a model's folder, from the headers of its files.

    Raises:
        InputError: a file is not in safetensors format.
    """
    headers = [_header(path) for path in folder.glob("*.safetensors")]
    return {name: tensor["shape"] for header in headers for name, tensor in header.items()}


def shapes_of(blobs: BlobStore, files: Mapping[str, TreeFile]) -> dict[str, list[int]]:
    """Return the shapes of a stored model's tensors, from the headers of its files."""
    found: dict[str, list[int]] = {}
    for name, file in files.items():
        if name.endswith(".safetensors") and "/" not in name:
            data = bytearray()
            for piece in blobs.stream(file.digest):
                data += piece
                if len(data) >= 8 and len(data) >= 8 + struct.unpack("<Q", data[:8])[0]:
                    break
            header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
            found |= {key: tensor["shape"] for key, tensor in header.items() if key != "__metadata__"}
    return found


def _survey(folder: Path, limits: ModelLimits) -> None:
    """Reject pickles and exceeded limits before files are hashed."""
    how = "; give the model's own folder, or raise the limit: posttrain init --model-limit"
    files, total, waiting = 0, 0, [(folder, 1)]
    while waiting:
        here, depth = waiting.pop()
        if depth > limits.depth:
            raise InputError(f"model {folder.name} must nest at most {limits.depth} folders, got more{how} depth=N")
        for path in sorted(here.iterdir()):
            if beside_model(path.relative_to(folder).as_posix() + "/" * path.is_dir()):
                continue
            if path.is_dir() and not path.is_symlink():
                waiting.append((path, depth + 1))
            elif path.is_file():
                files, total = files + 1, total + path.stat().st_size
                _refuse_pickle(path, folder)
            if files > limits.files or total > limits.bytes:
                word, most = ("files", limits.files) if files > limits.files else ("bytes", limits.bytes)
                raise InputError(f"model {folder.name} must contain at most {most} {word}, got more{how} {word}=N")


def _refuse_pickle(path: Path, folder: Path) -> None:
    """Reject a pickle by its name or its first bytes, and an archive, such as torch writes, that contains a pickle."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
        inside = zipfile.ZipFile(path).namelist() if start == b"PK\x03\x04" else []
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        start, inside = b"", []  # an unreadable file is reported when it is hashed
    if path.suffix in _PICKLES or start.startswith(_PICKLED) or any(name.endswith(_PICKLES) for name in inside):
        raise InputError(
            f"model {folder.name} must not contain pickled files, got {path.relative_to(folder)}; convert it to "
            "safetensors"
        )


_EXPONENTS = {  # type → unsigned integers of its size, and the bits of its exponent
    "F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80),
}  # fmt: skip
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def floating_types(folder: Path, *, below: bool = True) -> set[str]:
    """Return the floating-point types of the weights in a folder, by their headers: `{"bfloat16"}`.

    Args:
        below: whether files in folders below the folder count, where the adapter of a model is.

    Raises:
        InputError: a file is not in safetensors format.
    """
    paths = (folder.rglob if below else folder.glob)("*.safetensors")
    kinds = {tensor["dtype"] for path in paths for tensor in _header(path).values()}
    return {_TYPES.get(kind, kind.lower()) for kind in kinds if "F" in kind}


def _json_file(path: Path, model: str) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"model {model} has no {path.name}; give a folder in Hugging Face format") from error
    except OSError as error:
        raise InputError(f"model {model}: {path.name} cannot be read: {error.strerror}; check it") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"model {model}: {path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"model {model}: {path.name} must be a JSON object, got {type(value).__name__}")
    return value


def _shards(folder: Path) -> list[Path]:
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        parts = _json_file(index, folder.name).get("weight_map", {})
        if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts.values()):
            raise InputError(f"model {folder.name}: {index.name}: weight_map must map tensors to file names")
        names = sorted(set(parts.values()))
    for name in names:
        if Path(name).name != name or "\0" in name or not (folder / name).is_file():
            raise NotFoundError(f"model {folder.name} has no weights {name}; give a folder with safetensors weights")
    return [folder / name for name in names]


def _header(path: Path) -> Mapping[str, Any]:
    """Return the header: tensor name → {"dtype", "shape", "data_offsets"}.

    The header is JSON, after an 8-byte little-endian length.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(size - 8, _MAX_HEADER):
            raise InputError(
                f"{path.name} is not safetensors or is truncated: its header would have {length} of the file's "
                f"{size} bytes"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path.name} is not safetensors: its header is not JSON") from error
    if not isinstance(header, dict):
        raise InputError(f"{path.name} is not safetensors: its header must be a map, got {type(header).__name__}")
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    odd = next((name for name, tensor in tensors.items() if not _is_tensor(tensor)), None)
    if odd is not None:  # the name may be empty
        raise InputError(f"{path.name} is not safetensors: {odd[:60]!r} must have dtype, shape and data_offsets")
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, after = tensor["data_offsets"]
        if begin != end or after - begin != _stored(tensor):
            raise InputError(
                f"{path.name} is not safetensors: {name[:60]} must have {_stored(tensor)} bytes from offset {end} "
                f"according to its shape and the tensors before it, got bytes {begin} to {after}; save the model "
                "again"
            )
        end = after
    wanted = 8 + length + end
    if size != wanted:
        raise InputError(
            f"{path.name} must have {wanted} bytes according to its header, got {size}; copy the file again"
        )
    return tensors


def _stored(tensor: Mapping[str, Any]) -> int:
    """Return the size of a tensor in bytes, computed from dtype and shape, or from offsets for an unknown dtype."""
    bits = re.fullmatch(r"(?:F|BF|I|U)(\d+)(?:_.*)?", tensor["dtype"])
    width = 8 if tensor["dtype"] == "BOOL" else int(bits[1]) if bits else 0
    begin, after = tensor["data_offsets"]
    return int(math.prod(tensor["shape"]) * width // 8 if width else after - begin)


def _is_tensor(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        return False
    shape, offsets = value.get("shape"), value.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(_is_count(number) for number in (*shape, *offsets)) and offsets[0] <= offsets[1]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _check_sizes(config: Mapping[str, Any], model: str) -> None:
    """Reject sizes that are not positive whole numbers, since later code relies on positive sizes."""
    for key in _SIZES:
        value = config.get(key)
        if value is not None and not (_is_count(value) and value):
            raise InputError(f"model {model}: config.json: {key} must be a whole number from 1, got {value!r:.60}")
