"""Hugging Face models and tokenizers, packed attention, log-probabilities; checks of a model's abilities at load."""
