"""Rotations that are folded into the weights before quantization."""
