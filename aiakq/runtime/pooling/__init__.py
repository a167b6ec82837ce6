"""Embeddings and scores: prompts are pooled to vectors instead of continued."""
