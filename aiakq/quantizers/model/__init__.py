"""The model being quantized: read block by block, traced, run, and run again."""
