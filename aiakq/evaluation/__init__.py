"""Evaluation: how good a model is on a text, and how far a quantized model is from its original."""
