"""Speculative decoding: tokens are guessed, computed in one step, and kept as far as they are what would be sampled."""
