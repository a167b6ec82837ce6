"""Transforms: rewrite the weights of a block without changing its function, so that rounding loses less."""
