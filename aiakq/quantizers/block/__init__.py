"""One decoder block during quantization: its linears, calibration inputs, folded scales and results."""
