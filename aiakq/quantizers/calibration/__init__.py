"""What the model is calibrated on."""
