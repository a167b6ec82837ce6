"""Processes: the engine process with its client and supervisor, and the messages between processes."""
