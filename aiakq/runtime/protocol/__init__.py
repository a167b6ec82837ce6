"""Records that travel between routes, the engine and executors. Imports nothing else of the runtime, and no torch."""
