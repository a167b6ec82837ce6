"""What would run where: layers, missing tensors and implementations of a checkpoint or a loaded model."""
