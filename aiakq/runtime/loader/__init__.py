"""The loader: from a checkpoint to a model whose layers are bound to kernels."""
