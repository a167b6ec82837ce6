"""GGUF files from checkpoints: metadata, tensors and tokenizer, each proved by the reader of such files.

metadata.py says a model's config as typed keys and compares what the reader makes of them, tokenizer.py does so for the
tokenizer, file_types.py chooses the kind of blocks of every tensor, blocks.py encodes them, and conversion.py writes a
file and reads it back.
"""
