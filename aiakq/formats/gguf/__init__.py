"""GGUF, the files of llama.cpp: the container, the kinds of blocks, and linears in and out of them.

What the metadata and the names of tensors mean is a matter of ``gguf_model``.
"""
