"""Evaluation: perplexity of a model, and divergence of a quantized model from the original."""
