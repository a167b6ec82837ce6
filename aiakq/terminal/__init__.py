"""The command line's own parts: options, help, hints for slips, and everything drawn on a terminal.

Results go to standard output as JSON, everything for people to standard error; only ``console`` writes to either.
"""
