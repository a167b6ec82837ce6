"""Processes: the engine process, its client and supervisor, and what they send each other."""
