"""Hugging Face models and tokenizers, packed attention, log-probabilities; checks of a model's capabilities at load."""
