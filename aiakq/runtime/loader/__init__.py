"""The loader: builds a model from a checkpoint and binds its layers to kernels."""
