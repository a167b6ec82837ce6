"""The executor: runs the batches that the engine schedules, on one device."""
