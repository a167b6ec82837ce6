"""The packages of aiakq/quantizers import each other in one direction."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiakq.quantizers

FOLDER = Path(aiakq.quantizers.__file__).parent
#: Packages and modules, highest layer first; every other module is above them.
LAYERS = (
    {"planning", "report"},
    {"transforms", "rounders"},
    {"block"},
    {"model"},
    {"numerics", "calibration", "workers"},
    {"options", "paths", "recipe", "recipe_file", "methods"},
)
FILES = sorted(path.relative_to(FOLDER) for path in FOLDER.glob("**/*.py"))


def layer(name: str) -> int:
    return next((number for number, names in enumerate(LAYERS) if name in names), -1)


def imported_packages(path: Path) -> Iterator[str]:
    """The first part below aiakq.quantizers of everything a file imports, at any depth, also for types."""
    for node in ast.walk(ast.parse((FOLDER / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiakq.quantizers."):
            yield str(node.module).split(".")[2]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[2] for alias in node.names if alias.name.count(".") > 1)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_to_lower_layers_only(path: Path) -> None:
    package = path.parts[0].removesuffix(".py")
    above = {other for other in imported_packages(path) if layer(other) < layer(package)}
    assert not above, f"{path} imports {above}"
