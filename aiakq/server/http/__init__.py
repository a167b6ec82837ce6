"""HTTP: connections, limits, authentication and streaming."""
