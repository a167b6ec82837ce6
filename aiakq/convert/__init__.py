"""Conversion of quantized checkpoints from one format to another, or to 16- or 32-bit floats.

plan.py decides from headers how every linear is stored in the output, exact.py expresses the numbers of a weight in the
terms of another format, lossy.py rounds those that cannot be expressed, layers.py writes a linear and proves that it
reads back as the same numbers, and conversion.py does so for a whole checkpoint.
"""
