"""Paths that users name."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(name: str | os.PathLike[str]) -> Path:
    """Return the path ``name`` with a leading ``~`` or ``~user`` replaced by the home directory.

    That of a user who does not exist stays as it is, as in a shell, where ``Path.expanduser`` would raise RuntimeError.
    """
    return Path(os.path.expanduser(name))
