"""Reports of a run: JSON, HTML page and model card."""
