"""Numerics: rounding, clipping, and the GPTQ solver. Tensors in, tensors out."""
