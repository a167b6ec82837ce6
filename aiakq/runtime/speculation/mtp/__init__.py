"""Layers for multi-token prediction, which a checkpoint holds beside the layers of the model itself."""
