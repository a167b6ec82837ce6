"""One decoder block while it is quantized: its linears, calibration inputs, folded scales and results."""
