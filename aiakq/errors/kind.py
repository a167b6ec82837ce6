"""ErrorKind: an entry of the error registry, and the exit codes of the command line."""

from __future__ import annotations

from dataclasses import dataclass

# Exit codes of the command line. 0 is success; 130 and 143 mean the signals INT and TERM.
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
# bench compare and bench ab: the measurements do not allow a verdict.
UNDECIDED = 11


@dataclass(frozen=True)
class ErrorKind:
    """An entry of the registry. Its texts are ``str.format`` templates over the same fields.

    ``details`` are further lines, for the few failures that need more than one sentence.
    """

    message: str
    remedy: str
    exit_code: int = BAD_INPUT
    http_status: int = 400
    type: str = "invalid_request_error"
    details: str = ""
