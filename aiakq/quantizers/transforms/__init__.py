"""Transforms: changes to a block that leave its function as it is and make it easier to round."""
