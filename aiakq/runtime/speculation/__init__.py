"""Speculative decoding: draft tokens are verified in one step, and accepted while they equal the sampled tokens."""
