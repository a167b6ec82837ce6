"""Routes of models that generate nothing: embeddings, probabilities of labels, and scores."""
