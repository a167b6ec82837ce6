"""Transforms: rewrite the weights of a block without changing its function, to reduce the rounding error."""
