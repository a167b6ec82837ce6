"""Rounders: how the scaled weights of a layer become integer codes."""
