"""Executors run the steps that the engine schedules. Their protocol is in ``aiakq.runtime.engine.executor``."""
