"""Tuning of a quantized model's scales and norms, end to end, for fixed codes (``--tune``)."""
