"""The path under which a proxy offers the server (``--root-path``)."""

from __future__ import annotations


def route_path(path: str, root_path: str) -> str:
    """``path`` of a request as routes have it: a proxy may have removed ``root_path`` from it, or left it there."""
    root = root_path.rstrip("/")
    if root and f"{path}/".startswith(f"{root}/"):
        return path.removeprefix(root) or "/"
    return path
