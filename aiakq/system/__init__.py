"""The system: memory and threads of this machine, without torch."""
