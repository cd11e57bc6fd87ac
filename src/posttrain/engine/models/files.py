"""Reading, writing and creation of models and tokenizers, and conversion between rows and token ids.

Models are Hugging Face folders with safetensors only.

An initial model has random weights and a character tokenizer with a chat template. Demos and tests use it without a
download.

A worker opens its model in its own process, from a folder that every rank can read.

Chat templates, prompts and demonstrations become token ids. Rows are canonical (`posttrain.data.rows`): `prompt` [+
`completion`], `messages`, or `text`. Model output is never decoded and encoded again. Rows are rendered by
`domain.rendering`, which the plan also uses.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jinja2.exceptions import TemplateError
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.rendering import (
    CONFIG,
    TimeLimitError,
    examples,
    is_classifier,
    pairs,
    prompts,
    row_errors,
    time_limit,
)
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.adapters import (
    attach,
    attach_saved,
    attached,
    in_folder,
    read_adapter,
    write_adapter,
)
from posttrain.engine.models.backbone import Backbone
from posttrain.engine.models.language_model import (
    LanguageModel,
    ScalarModel,
    adopt_classifier,
    adopt_module,
    put_scalar_head,
)
from posttrain.engine.settings import LoraConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
ROLES = ("system", "user", "assistant")
_ROLE_TOKENS = [f"<|{role}|>" for role in ROLES]
# A turn is <|im_start|><|role|>content<|im_end|>. Hugging Face's assistant mask needs the generation marks.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user or assistant, got ' + m['role']) }}{% endif %}"
    "<|im_start|>{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
)
_ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
_ANY_TOKENIZER = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes for any tokenizer.json
_RENDER_SECONDS = 10.0  # maximum time of one rendering, 100,000 times the usual time
Row = Mapping[str, Any]


def load_model(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    adapter: LoraConfig | None = None,
    seed: int = 0,
    quantize: str | None = None,
) -> LanguageModel:
    """Load a causal language model and check its capabilities, without network, pickle or code from the folder.

    Args:
        dtype: float32, bfloat16, float16 or float64.
        adapter: the adapter to train: that of the folder if it has one, else a new one.
        seed: the seed of a new adapter.
        quantize: nf4, for linear layers in 4 bits; None: all weights in `dtype`.

    Raises:
        NotFoundError: the folder or its `config.json` does not exist.
        InputError: the weights are not safetensors or are incomplete; the dtype is unknown; the device does not exist;
            the architecture is not a causal language model of transformers.
    """
    _check_folder(folder)
    if is_sequence_classifier(folder):
        raise InputError(
            f"model in {folder} must be a causal language model, got a sequence classifier; name another model"
        )
    module = _read_module(AutoModelForCausalLM, folder, device, dtype, quantize)
    return adopt_module(_adapted(module, folder, adapter, seed))


def load_scalar_model(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    adapter: LoraConfig | None = None,
    seed: int = 0,
    quantize: str | None = None,
) -> ScalarModel:
    """Load a value or reward model.

    The folder has a sequence classifier with one label, which is loaded as saved, or a causal language model, whose
    backbone gets a head of zeros, or the head of the folder's adapter.

    Args:
        adapter, seed, quantize: see `load_model`.

    Raises:
        NotFoundError: the folder or its `config.json` does not exist.
        InputError: see `load_model`; transformers has no sequence classifier of this architecture; the classifier's
            head is not one linear layer without bias, applied to the last token.
    """
    _check_folder(folder)
    if _is_whole_classifier(folder):
        module = _read_module(AutoModelForSequenceClassification, folder, device, dtype, quantize)
    else:
        module = put_scalar_head(_read_module(AutoModelForCausalLM, folder, device, dtype, quantize))
    return adopt_classifier(_adapted(module, folder, adapter, seed))


def _adapted(module: PreTrainedModel, folder: Path, adapter: LoraConfig | None, seed: int) -> PreTrainedModel:
    """Attach the adapter of the folder, or a new one.

    Raises:
        InputError: see `attach` and `attach_saved`; the folder has another adapter than the one to train.
    """
    if in_folder(folder):
        if adapter is not None:
            read_adapter(folder).refuse_other(adapter.described(), str(folder))
        attach_saved(module, folder, dropout=adapter.dropout if adapter else 0.0)
    elif adapter is not None:
        attach(module, adapter, seed)
    return module


def is_sequence_classifier(folder: Path) -> bool:
    """Return whether the folder contains a sequence classifier, or an adapter that makes its base one."""
    return (in_folder(folder) and read_adapter(folder).scores) or _is_whole_classifier(folder)


def _is_whole_classifier(folder: Path) -> bool:
    try:
        return is_classifier(json.loads((folder / CONFIG).read_bytes()))
    except (ValueError, OSError, AttributeError) as error:
        raise InputError(f"model in {folder} must have a readable config.json: {_first_line(error)}") from error


def _read_module(auto_class: Any, folder: Path, device: str, dtype: str, quantize: str | None) -> PreTrainedModel:
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise InputError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device!r} was requested, but torch finds no CUDA device; use device cpu")
    if not any(folder.glob("*.safetensors")):
        found = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        raise InputError(
            f"weights in {folder} must be *.safetensors, got {', '.join(found) or 'none'}; convert them first"
        )
    try:
        module, info = auto_class.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=kind,
            output_loading_info=True,
            **(_in_four_bits(kind, device) if quantize else {}),
        )
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"model in {folder} cannot be loaded: {_first_line(error)}; check its config.json and weights"
        ) from error
    if info["missing_keys"]:  # transformers would fill missing weights with random numbers
        raise InputError(
            f"weights in {folder} must be complete, but {min(info['missing_keys'])} is missing; copy the model again"
        )
    loaded: PreTrainedModel = module if quantize else module.to(device)
    for part in loaded.modules() if quantize else ():
        # bitsandbytes repacks weights for some CPUs when no gradient is needed, and later gradients are then wrong
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    return loaded


def _in_four_bits(kind: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments with which transformers quantises linear layers to nf4 while it reads them.

    Raises:
        InputError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise InputError(
            "adapter.quantize: nf4 needs the package bitsandbytes, which is not installed here; pip install "
            "'posttrain[qlora]'"
        )
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=kind)
    return {"quantization_config": config, "device_map": {"": device}}


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder, running no code from it.

    A tokenizer without a class of transformers is read as tokenizer.json describes it: `AutoTokenizer` would
    replace its rules with those of the usual tokenizer of some model types, such as qwen2.

    Raises:
        NotFoundError: the folder does not exist.
        InputError: the folder has no tokenizer that transformers can read.
    """
    if not folder.is_dir():
        raise NotFoundError(f"tokenizer folder {folder} does not exist; check the path")
    try:
        tokenizer: PreTrainedTokenizerBase = (
            PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            if _has_general_class(folder)
            else AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise InputError(
            f"tokenizer in {folder} cannot be loaded: {_first_line(error)}; check tokenizer.json"
        ) from error
    # Otherwise the load arguments would be saved with the tokenizer, and would change the saved bytes.
    for argument in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(argument, None)
    return tokenizer


def _has_general_class(folder: Path) -> bool:
    """Return whether the class of a tokenizer is the one for any tokenizer.json."""
    config = folder / "tokenizer_config.json"
    found = json.loads(config.read_bytes()) if config.is_file() and (folder / "tokenizer.json").is_file() else None
    return isinstance(found, dict) and found.get("tokenizer_class") in _ANY_TOKENIZER


def save_model(
    model: Backbone,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    gathered: Mapping[str, Tensor] | None = None,
    *,
    write: bool = True,
) -> None:
    """Write weights, configuration and tokenizer. Equal weights are written as equal bytes.

    The configuration names the dtype of the written weights. Of a model with an adapter, only the adapter is written.

    Args:
        folder: created if missing.
        gathered: whole weights to write instead of the module's weights, which may be sharded or have a different
            dtype; tied weights occur once.
        write: False on ranks that only took part in the gathering.
    """
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if attached(model.module) is not None:
        write_adapter(model.module, folder, gathered)
        return
    state = _detached_state(model.module) if gathered is None else dict(gathered)
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    model.module.save_pretrained(folder, state_dict=state)  # empties the state
    _name_dtype(model.module.config, dtype, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _name_dtype(config: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write this dtype into the configuration; sharding may have widened the module's dtype for the optimiser."""
    for part in (config, config.get_text_config()):
        part.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)


def _detached_state(module: PreTrainedModel) -> dict[str, Any]:
    """Return clones of the weights; only tied weights share memory. (A zero-copy decoder fuses parameters.)"""
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
        raise NotFoundError(f"{folder} is not a model folder: it has no config.json; check the path")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with seven special tokens and one token per character; unknown characters are `<|unk|>`."""
    vocabulary = [PAD, START, END, UNKNOWN, *_ROLE_TOKENS, *characters]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=_ROLE_TOKENS,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def initial_model(config: InitModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return a model with random weights in float32 on the CPU.

    The same (config, seed) gives the same bytes. The global random generator stays unchanged.
    """
    config_class, model_class = _ARCHITECTURES[config.architecture]
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    architecture = config_class(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(architecture).float()
    for name, value in special.items():
        setattr(model.generation_config, name, value)
    return model


@final
@dataclass(frozen=True, slots=True)
class ModelSource:
    """The folder of a language model, e.g. `ModelSource(Path("…/model"), dtype="auto")`."""

    folder: Path
    dtype: str = "auto"  # auto: bfloat16 on CUDA, float32 on CPU
    adapter: LoraConfig | None = None  # the adapter to train; None: the whole model, or no training
    seed: int = 0  # of a new adapter
    quantize: str | None = None  # nf4: linear layers in 4 bits

    def open(self, device: str) -> LanguageModel:
        """Load the model.

        Raises:
            NotFoundError, InputError: see `load_model`.
        """
        dtype = settled_dtype(self.dtype, device)
        return load_model(
            self.folder, device=device, dtype=dtype, adapter=self.adapter, seed=self.seed, quantize=self.quantize
        )


@final
@dataclass(frozen=True, slots=True)
class ScalarSource:
    """The folder of a value or reward model; a causal language model gets a head of zeros."""

    folder: Path
    dtype: str = "auto"
    adapter: LoraConfig | None = None
    seed: int = 0
    quantize: str | None = None

    def open(self, device: str) -> ScalarModel:
        """Load the model.

        Raises:
            NotFoundError, InputError: see `load_scalar_model`.
        """
        dtype = settled_dtype(self.dtype, device)
        return load_scalar_model(
            self.folder, device=device, dtype=dtype, adapter=self.adapter, seed=self.seed, quantize=self.quantize
        )


def settled_dtype(dtype: str, device: str) -> str:
    """Return the dtype; `auto` is replaced by the default of the device."""
    return dtype if dtype != "auto" else "bfloat16" if device.startswith("cuda") else "float32"


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised document: the loss is on `completion`, whose last token is the end of sequence."""

    row: int  # position in the data set, from 0
    prompt: tuple[int, ...]
    completion: tuple[int, ...]


def decode_response(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, ended: bool) -> str:
    """Return a response as text, without its end of sequence.

    Other special tokens stay visible: a response that is correct only without them is wrong.

    Args:
        ended: whether the last token ends the sequence, as the rollout recorded. The tokenizer has only one
            end-of-sequence token, and a model may have several.
    """
    said = np.asarray(tokens[:-1] if ended else tokens, dtype=np.int64)  # transformers checks list items one by one
    return str(tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def decode_turn(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Return one of several responses of a sample as text, without special tokens, such as those that end it."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, name: str, limit: int, reserve: int = 0
) -> list[tuple[int, ...]]:
    """Return the prompt ids of every row.

    Args:
        name: the data set's name in errors.
        limit: the model's context, tokens.
        reserve: tokens reserved for the response.

    Raises:
        InputError: a row cannot be rendered, or does not fit. The error names the data set and the row (from 1).
    """
    found = []
    for number, ids in enumerate(prompts(_Tokens(tokenizer), rows, name=name), start=1):
        if len(ids) + reserve > limit:
            room = f"{limit} - {reserve} (max_new_tokens)" if reserve else f"{limit}"
            least = f"set max_new_tokens to {limit - len(ids)} at most, or " if 0 < limit - len(ids) < reserve else ""
            act = f"{least}shorten or drop it"
            raise InputError(f"{name} row {number}: prompt must have at most {room} tokens, got {len(ids)}; {act}")
        found.append(ids)
    return found


def encode_examples(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, name: str, limit: int, labelled: bool = False
) -> list[Example]:
    """Return every demonstration of every row; a conversation has one example per assistant turn.

    With `labelled`, rows are labelled completions, and a preference pair has two examples, the chosen response first.

    Raises:
        InputError: a row cannot be rendered, or is longer than `limit` tokens (rows are never truncated). The error
            names the data set and the row.
    """
    found = []
    for number, turns in enumerate(examples(_Tokens(tokenizer), rows, name=name, labelled=labelled), start=1):
        for prompt, completion in turns:
            length = len(prompt) + len(completion)
            if length > limit:
                raise InputError(
                    f"{name} row {number}: prompt and completion must have at most {limit} tokens, got {length}; "
                    "shorten the row, drop it or raise max_length"
                )
            found.append(Example(number - 1, prompt, completion))
    return found


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A preference row as token ids; both responses end with the end-of-sequence token."""

    row: int
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def encode_preferences(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, name: str, limit: int
) -> list[PreferencePair]:
    """Return every row's pair.

    Raises:
        InputError: a row lacks `prompt`, `chosen` or `rejected`, cannot be rendered, has equal responses, or is longer
            than `limit` tokens (rows are never truncated). The error names the data set and the row.
    """
    found = []
    for number, (prompt, chosen, rejected) in enumerate(pairs(_Tokens(tokenizer), rows, name=name), start=1):
        with row_errors(name, number):
            if chosen == rejected:
                raise InputError("chosen and rejected must differ, got the same response twice; drop the row")
        length = len(prompt) + max(len(chosen), len(rejected))
        if length > limit:
            raise InputError(
                f"{name} row {number}: prompt and response must have at most {limit} tokens, got {length}; "
                "shorten the row, drop it or raise max_length"
            )
        found.append(PreferencePair(number - 1, prompt, chosen, rejected))
    return found


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """A prompt with a completion, as token ids, and whether the completion is desirable."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    label: bool


class _Tokens:
    """A tokenizer of transformers with the interface of `domain.rendering`."""

    raised = (TemplateError,)

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.end: int | None = tokenizer.eos_token_id  # stored: each read searches the vocabulary
        self.templated = bool(tokenizer.chat_template)

    def render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        try:
            with time_limit(_RENDER_SECONDS):
                return str(
                    self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=generate, tokenize=False)
                )
        except (TimeLimitError, MemoryError):
            raise InputError(
                f"the chat template must render a row within {_RENDER_SECONDS:g} s; simplify its loops"
            ) from None

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return ids
