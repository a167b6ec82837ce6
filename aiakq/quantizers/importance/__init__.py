"""How much each calibration token matters to each linear: gradients of the original model's predictions."""
