"""The rooms of the server import one way, as aiakq/server/__init__.py says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import aiakq.server

#: Highest first; rooms of one row do not import each other. Modules beside the rooms, like launch.py, are above them.
ROWS = [("api",), ("http", "process"), ("telemetry", "errors")]
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
FOLDER = Path(aiakq.server.__file__).parent
MODULES = {path.relative_to(FOLDER).with_suffix("").parts: path for path in FOLDER.rglob("*.py")}


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, given by its name's parts below aiakq.server; "" for those beside the rooms."""
    return parts[0] if parts[0] in ROW_OF else ""


def server_imports(path: Path) -> set[tuple[str, ...]]:
    """The modules of the server that a file imports, at any depth, also for types only."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [tuple((node.module or "").split(".")) for node in nodes]
    return {name[2:] for name in names if name[:2] == ("aiakq", "server") and len(name) > 2}


@pytest.mark.parametrize("parts", MODULES, ids="/".join)
def test_rooms_import_only_rooms_below(parts):
    room = room_of(parts)
    for other in server_imports(MODULES[parts]):
        target = room_of(other)
        assert room == target or ROW_OF.get(room, -1) < ROW_OF.get(target, -1), f"imports {'.'.join(other)}"
