"""What was done, as JSON, as a page and as a model card."""
