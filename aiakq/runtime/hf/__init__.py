"""What is known about transformers: its configs, its checkpoints, and running its models with paged attention."""
