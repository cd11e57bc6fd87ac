"""Served models: a server that answers in OpenAI's form, over one engine process for each model."""
