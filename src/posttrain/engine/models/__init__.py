"""Hugging Face models and tokenizers, packed attention, log-probabilities; what a model can do is checked at load."""
