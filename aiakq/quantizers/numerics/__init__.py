"""Numerics: the GPTQ solver and what it stands on. Tensors in, tensors out."""
