"""Routes of pooling models: embeddings, classification, and scores."""
