"""Executors: they run the steps that the engine schedules. The protocol is in ``aiakq.runtime.engine.records``."""
