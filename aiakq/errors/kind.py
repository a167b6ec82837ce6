"""ErrorKind: one row of the registry of errors, and the exit codes of the command line."""

from __future__ import annotations

from dataclasses import dataclass

# Exit codes of the command line. 0 is success, 130 and 143 are the signals INT and TERM.
BUG = 1
USAGE = 2
BAD_INPUT = 3
UNSAFE = 4
RESOURCES = 5
CONFLICT = 6
ENVIRONMENT = 7
NUMERIC = 8
WORKER = 9
GATE = 10
# Of bench compare and bench ab: neither worse nor not worse.
UNDECIDED = 11


@dataclass(frozen=True)
class ErrorKind:
    """One row of the registry. Its texts are ``str.format`` templates over the same fields.

    ``details`` are further lines, for the few failures that do not fit into one sentence.
    """

    message: str
    remedy: str
    exit_code: int = BAD_INPUT
    http_status: int = 400
    type: str = "invalid_request_error"
    details: str = ""
