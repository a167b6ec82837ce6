"""Images in prompts: limits, preprocessing, the encoder cache, and the encoders."""
