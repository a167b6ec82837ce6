"""The terminal user interface: options, help, usage errors, tables and progress.

Results go to standard output as JSON, everything for people to standard error; only ``console`` writes to either.
"""
