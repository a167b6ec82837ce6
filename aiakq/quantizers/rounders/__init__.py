"""Rounders: turn the weights of a layer into integer codes."""
