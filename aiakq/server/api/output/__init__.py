"""Incremental parsing of generated text into events."""
