"""Child processes: ending with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def describe_exit(code: int) -> str:
    """Why a process ended, in words; ``code`` is that of ``Popen.wait``."""
    return f"it ended with exit code {code}" if code >= 0 else f"it was ended by {signal.Signals(-code).name}"


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever it is doing. Only Linux can.

    On other systems this does nothing. The parent is the thread that started this process: it must not end earlier.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has just ended
        os._exit(0)
