"""Tensor and pipeline parallelism: ranks are processes that compute one model together."""
