"""Telemetry: metrics and server events."""
