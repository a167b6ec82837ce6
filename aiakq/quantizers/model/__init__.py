"""The source model: loaded, traced and run block by block."""
