"""Hugging Face models and tokenizers, packed attention, log-probabilities; what a model can do is checked at load."""

from posttrain.engine.models.backbone import Backbone
from posttrain.engine.models.language_model import (
    LanguageModel,
    OutputHead,
    ScalarModel,
    adopt_classifier,
    adopt_module,
    sequence_scores,
    token_values,
)
from posttrain.engine.models.loading import (
    copy_weights,
    load_model,
    load_scalar_model,
    load_tokenizer,
    restore_weights,
    save_model,
)
from posttrain.engine.models.logprobs import token_logprobs, token_logprobs_and_entropy

__all__ = [
    "Backbone",
    "LanguageModel",
    "OutputHead",
    "ScalarModel",
    "adopt_classifier",
    "adopt_module",
    "copy_weights",
    "load_model",
    "load_scalar_model",
    "load_tokenizer",
    "restore_weights",
    "save_model",
    "sequence_scores",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "token_values",
]
