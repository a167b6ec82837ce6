"""The server: an OpenAI-compatible HTTP API in front of an engine in a process of its own."""
