"""Rounding of weights to codes without calibration: ranges, scales and nearest codes. Tensors in, tensors out."""
