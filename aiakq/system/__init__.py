"""Host memory and threads, without torch."""
