"""Memory and CPU limits that a container or service manager sets with cgroups, version 1 or 2.

A limit applies to a group and all groups inside it, so all groups from this process's own to the outermost visible one
are considered. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Values from this on mean no limit in version 1.
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Cgroup:
    """A folder of cgroup files, of version 1 or 2."""

    folder: Path
    version: int

    def available_memory(self) -> int | None:
        """Return the bytes left until the limit; None without one. Inactive file pages count as available."""
        unified = self.version == 2
        limits = [
            self._number(name) for name in (("memory.max", "memory.high") if unified else ("memory.limit_in_bytes",))
        ]
        known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
        used = self._number("memory.current" if unified else "memory.usage_in_bytes")
        if not known or used is None:
            return None
        name = "inactive_file" if unified else "total_inactive_file"
        cached = next((int(value) for key, value in self._pairs("memory.stat") if key == name), 0)
        return max(0, min(known) - max(0, used - cached))

    def processors(self) -> float | None:
        """Return the CPU limit as a number of processors; None without a limit."""
        if self.version == 2:
            quota, period = next(iter(self._pairs("cpu.max")), ("max", "1"))
        else:
            quota, period = self._text("cpu.cfs_quota_us"), self._text("cpu.cfs_period_us")
        if not (quota.isdecimal() and period.isdecimal()) or not int(period):
            return None
        return int(quota) / int(period)

    def _number(self, name: str) -> int | None:
        text = self._text(name)
        return int(text) if text.isdecimal() else None

    def _pairs(self, name: str) -> Iterator[tuple[str, str]]:
        for line in self._text(name).splitlines():
            key, _, value = line.partition(" ")
            yield key, value.strip()

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text().strip()
        except (OSError, ValueError):
            return ""


def cgroups(controller: str, root: Path = Path("/")) -> list[Cgroup]:
    """Return the groups of this process for ``controller`` ("memory" or "cpu"), its own first.

    root  root folder of /proc and of the mount points.
    """
    groups: list[Cgroup] = []
    paths = _own_paths(root)
    for mount_root, mount_point, version, controllers in _mounts(root):
        names = {""} if version == 2 else {controller} & controllers
        for name in names & paths.keys():
            # In a container without its own cgroup namespace, the path and the root of the mount are the host's.
            inside = _relative(paths[name], mount_root)
            top = root / mount_point.lstrip("/")
            parts = [part for part in inside.split("/") if part]
            for depth in range(len(parts), -1, -1):
                groups.append(Cgroup(top.joinpath(*parts[:depth]), version))
    return groups


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can allocate within its limits; None without a limit."""
    limits = [group.available_memory() for group in cgroups("memory", root)]
    return min((limit for limit in limits if limit is not None), default=None)


def processor_limit(root: Path = Path("/")) -> float | None:
    """Return the CPU limit of this process as a number of processors; None without a limit."""
    limits = [group.processors() for group in cgroups("cpu", root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _own_paths(root: Path) -> dict[str, str]:
    """Return the group of this process by controller; the key is "" for version 2."""
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounts(root: Path) -> Iterator[tuple[str, str, int, set[str]]]:
    """Yield every mounted hierarchy: its root, mount point, version, and (in version 1) controllers."""
    for line in _lines(root / "proc/self/mountinfo"):
        words, _, rest = line.partition(" - ")
        fields, kind = words.split(), rest.split()
        if len(fields) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        yield fields[3], fields[4], 2 if kind[0] == "cgroup2" else 1, set(kind[-1].split(","))


def _relative(path: str, mount_root: str) -> str:
    """Return ``path`` relative to ``mount_root``; the mount itself if it lies outside."""
    base = mount_root.rstrip("/")
    if path == base or path.startswith(f"{base}/"):
        inside = path[len(base) :]
        return "" if "/.." in inside else inside
    return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []
