"""Loading Hugging Face models and tokenizers, packed attention, log-probabilities."""
