"""Language models and scalar models of transformers, whose capabilities are detected when they are wrapped.

No architecture is trusted. Packing and the form of the output head are capabilities: they are tried on small inputs,
compared with the plain forward, and used only if the results agree.

Scalar models predict a number instead of a distribution: a critic's values, a reward model's scores. On disk they have
the usual form: a sequence classifier of transformers with one label (backbone + `score.weight`, no bias). Here they run
over packed documents like every other model. The head computes in float32, because a score is one dot product over the
hidden size, and the model learns from differences of scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from posttrain.domain.errors import InputError
from posttrain.engine.batch import TokenBatch
from posttrain.engine.models.adapters import attached, base_layer, head_adapter
from posttrain.engine.models.backbone import (
    Backbone,
    Forward,
    agree,
    choose_packing,
    last_hidden_states,
    probe_documents,
)

HALF = (torch.bfloat16, torch.float16)
_BLOCK = 2**24  # number of half-precision head weights that are widened at a time on the CPU


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """Logits as a function of the last hidden state: softcap * tanh((W h + b) / softcap), or just W h + b.

    A head with an adapter has the weight W + s B A, which is never formed.
    """

    layer: nn.Linear
    softcap: float | None
    adapter: tuple[nn.Linear, Tensor, float] | None = None  # the layer of A, B [vocabulary, rank], and s

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, [N, hidden] → [N, vocabulary]; see `float32_logits`."""
        logits = float32_logits(hidden, self.layer.weight, self.layer.bias)
        if (low := self.low(hidden)) is not None:
            logits = logits + float32_logits(*low)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def low(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return s A h, [N, rank], and B, whose product is added to W h; None: there is no adapter."""
        if self.adapter is None:
            return None
        down, up, scale = self.adapter
        return down(hidden) * scale, up


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel(Backbone):
    """A loaded model, e.g. `LanguageModel(module=Qwen3ForCausalLM, packing="packed", head=OutputHead(…))`."""

    head: OutputHead | None  # None: no head reproduces the module's logits, so the module computes them

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        found = Backbone.fallbacks(self)
        if self.head is None:
            name = type(self.module).__name__
            found["whole_logits"] = f"the output head of {name} is not a plain matrix: all logits are held at once"
        return found

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        return int(self.config.vocab_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a response; empty if the model defines none."""
        ids = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)

    def logits(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], keep: Tensor) -> Tensor:
        """Return the logits after the N tokens at the packed indices `keep`: [T] packed → [N, vocabulary]."""
        if self.head is not None:
            return self.head.logits(self.hidden_states(tokens, positions, lengths)[keep])
        return self.run(_logits(self.module), tokens, positions, lengths)[keep]


def float32_logits(hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return logits in float32 from weights in half precision, without a float32 copy of the head.

    Rounded to bfloat16, logits of 16 and more are 0.125 apart, and so are log-probabilities. Products of bfloat16
    numbers are exact in float32, so only the rounding of float32 sums remains. Rollout and training both compute their
    logits with this function.

    Returns:
        [N, vocabulary] from [N, hidden] and [vocabulary, hidden]; float64 for float64 inputs.
    """
    if hidden.dtype not in HALF:
        return F.linear(hidden, head, bias)
    if hidden.device.type == "cuda":
        out = torch.mm(hidden, head.t(), out_dtype=torch.float32)
    else:
        out = hidden.new_empty(len(hidden), len(head), dtype=torch.float32)
        wide, rows = hidden.float(), max(1, _BLOCK // head.shape[1])
        for begin in range(0, len(head), rows):
            out[:, begin : begin + rows] = F.linear(wide, head[begin : begin + rows].float())
    return out if bias is None else out + bias.float()


def adopt_module(module: PreTrainedModel) -> LanguageModel:
    """Detect a module's capabilities and wrap the module, which is put into evaluation mode.

    Packing is tried on the module's logits, see `backbone.choose_packing`.
    """
    module.eval()
    return LanguageModel(module, choose_packing(module, _logits(module)), _find_head(module))


def _logits(module: PreTrainedModel) -> Forward:
    """Return the forward pass through the whole module."""

    def forward(**inputs: Any) -> Tensor:
        logits: Tensor = module(**inputs).logits
        return logits

    return forward


def _find_head(module: PreTrainedModel) -> OutputHead | None:
    """Return the output head, if W h + b (soft-capped or not) reproduces the module's logits; else None."""
    found, saved = module.get_output_embeddings(), attached(module)
    layer = base_layer(found) if saved else found
    if type(layer) is not nn.Linear:
        return None
    softcap = getattr(module.config.get_text_config(), "final_logit_softcapping", None)
    head = OutputHead(layer, softcap, head_adapter(found, saved) if saved else None)
    tokens = probe_documents(module)[0][None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    with torch.no_grad():
        try:
            wanted = _logits(module)(**inputs)
            computed = head.logits(last_hidden_states(module)(**inputs)[0])[None]
        except (TypeError, AttributeError, RuntimeError, ValueError):
            return None
    return head if agree(computed.to(wanted.dtype), wanted) else None


@dataclass(frozen=True, slots=True, eq=False)
class ScalarModel(Backbone):
    """A loaded value or reward model, e.g. `ScalarModel(module=Qwen3ForSequenceClassification, packing="packed")`."""

    @property
    def head(self) -> nn.Linear:
        """The head's layer, [1, hidden], without bias."""
        head: nn.Linear = self.module.score
        return head

    def scalars(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], keep: Tensor) -> Tensor:
        """Apply the head to the hidden states of N tokens at the packed indices `keep`: [T] packed → [N] float32."""
        return F.linear(self.hidden_states(tokens, positions, lengths)[keep].float(), self.head.weight.float())[:, 0]


def token_values(model: ScalarModel, batch: TokenBatch) -> Tensor:
    """Return V before each response token, differentiable: the head applied to the preceding token's hidden state.

    The first response token's value is V(prompt). A batch without response tokens also runs through the model, because
    every rank must take part in collectives.

    Returns:
        [T] float32, 0 outside the response.

    Raises:
        InputError: a document is longer than the model's context.
    """
    values = torch.zeros(len(batch.tokens), dtype=torch.float32, device=batch.device)
    if not batch.documents:
        return values
    model.check_length(max(batch.lengths))
    index = batch.response_mask.nonzero()[:, 0]
    if model.sequence is not None:
        index = index[model.sequence.owns(index - 1, len(batch.tokens))]
    values = values.index_copy(0, index, model.scalars(batch.tokens, batch.positions, batch.lengths, index - 1))
    return values if model.sequence is None else model.sequence.sum(values)


def sequence_scores(model: ScalarModel, batch: TokenBatch) -> Tensor:
    """Return the head applied to the hidden state of each document's last token, differentiable.

    Returns:
        [documents] float32.

    Raises:
        InputError: a document is longer than the model's context.
    """
    if not batch.documents:
        return torch.zeros(0, dtype=torch.float32, device=batch.device)
    model.check_length(max(batch.lengths))
    last = torch.tensor(batch.lengths, device=batch.device).cumsum(0) - 1
    if model.sequence is None:
        return model.scalars(batch.tokens, batch.positions, batch.lengths, last)
    mine = model.sequence.owns(last, len(batch.tokens)).nonzero()[:, 0]
    scores = torch.zeros(batch.documents, dtype=torch.float32, device=batch.device)
    found = model.scalars(batch.tokens, batch.positions, batch.lengths, last[mine])
    return model.sequence.sum(scores.index_copy(0, mine, found))


def put_scalar_head(module: PreTrainedModel) -> PreTrainedModel:
    """Return a sequence classifier with one label, the backbone of `module` and a head of zeros.

    With a head of zeros, a critic begins with value 0, and a reward model without a preference.

    Args:
        module: a causal language model; its weights and configuration are reused.

    Raises:
        InputError: transformers has no sequence classifier with this backbone.
    """
    name, backbone = type(module).__name__, module.base_model
    module.config.num_labels = 1
    try:
        with torch.device("meta"):  # allocates no memory, because backbone and head are replaced
            shell: PreTrainedModel = AutoModelForSequenceClassification.from_config(module.config)
    except ValueError as error:
        raise InputError(
            f"{name} cannot score: transformers has no sequence classifier for it; use another model"
        ) from error
    if type(shell.base_model) is not type(backbone) or not _has_scalar_head(shell):
        raise InputError(
            f"{name} cannot score: the form of its sequence classifier {type(shell).__name__} is not supported; use "
            "another model"
        )
    weight = next(backbone.parameters())
    head = torch.zeros(shell.score.weight.shape, dtype=weight.dtype, device=weight.device)
    setattr(shell, shell.base_model_prefix, backbone)
    shell.score.weight = nn.Parameter(head)
    shell.config = _readable_to_the_end(module.config)
    return shell


def adopt_classifier(module: PreTrainedModel) -> ScalarModel:
    """Detect a sequence classifier's capabilities and wrap the module, which is put into evaluation mode.

    Raises:
        InputError: the head is not a linear layer with one output and no bias, applied to the last token.
    """
    module.eval()
    if not _has_scalar_head(module) or not _is_read_at_the_end(module):
        raise InputError(
            f"{type(module).__name__} must score by one linear layer without bias and one label (num_labels 1) on the "
            "last token, got another head; train it again from a causal language model"
        )
    return ScalarModel(module, choose_packing(module, last_hidden_states(module)))


def _readable_to_the_end(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove a padding token that also ends sequences: transformers scores the last token that is not padding.

    Without a padding token, transformers accepts single sequences only; with it, transformers would silently score one
    token too early.
    """
    text = config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if text.pad_token_id in ends:
        text.pad_token_id = None
    return config


def _has_scalar_head(module: PreTrainedModel) -> bool:
    head = getattr(module, "score", None)
    return type(head) is nn.Linear and head.out_features == 1 and head.bias is None


@torch.no_grad()
def _is_read_at_the_end(module: PreTrainedModel) -> bool:
    """Return whether the module's own score equals the head on the last hidden state."""
    first, second, _ = probe_documents(module)
    tokens = first if int(first[-1]) != module.config.get_text_config().pad_token_id else second
    inputs = {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens[None]), "use_cache": False}
    try:
        wanted = module(**inputs).logits
        found = module.score(last_hidden_states(module)(**inputs))[:, -1]  # in the module's precision, like `wanted`
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False
    return agree(found, wanted)
