"""Builds engines: models, runners, ranks and draft models. The only part of the runtime that knows all others."""
