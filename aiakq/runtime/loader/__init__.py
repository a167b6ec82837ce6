"""Weights: the tensors of a checkpoint or random ones, bound to the layers of a model."""
