"""The path prefix under which a proxy exposes the server (``--root-path``)."""

from __future__ import annotations


def route_path(path: str, root_path: str) -> str:
    """Return ``path`` without ``root_path``, which a proxy may or may not have removed."""
    root = root_path.rstrip("/")
    if root and f"{path}/".startswith(f"{root}/"):
        return path.removeprefix(root) or "/"
    return path
