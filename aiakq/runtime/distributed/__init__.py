"""Ranks: processes that compute one model together."""
