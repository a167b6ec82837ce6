"""Structured output: grammars of requests, and which tokens they allow next."""
