"""Mistral's own format: params.json, consolidated*.safetensors, and tekken.json or tokenizer.model.v*.

A folder in this format is read as a model in Hugging Face's: ``params.py`` translates its config, ``tensors.py`` names
and orders its tensors, and ``folder.py`` makes the folder in the cache that everything else opens.
"""
