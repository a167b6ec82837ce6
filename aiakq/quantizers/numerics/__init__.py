"""The numbers: rounding, ranges, and the loops that make up for errors. Tensors in, tensors out."""
