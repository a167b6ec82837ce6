"""Print how much of the code repeats itself or is woven together: ``python docs/metrics.py [REVISION ...]``.

Each number is counted in the syntax trees, so that two revisions can be compared. Without arguments the working tree is
counted.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: What names a feature in an identifier.
FEATURES = {
    "LoRA": r"lora|adapter",
    "drafts": r"draft|specul|propos|eagle",
    "structured output": r"grammar|structured|matcher",
    "pooling": r"pool(ing|ed)\b|pool(ing|ed)_|_pool(ing|ed)",
}
#: Pages that docs/generate.py writes, or wrote; the list of modules was once a part of structure.md.
GENERATED = ("cli.md", "aiakq.1", "arguments.md", "routes.md", "errors.md", "structure.md")
MODULES_HEADING = "## Every module"


class Tree:
    """The Python files of one revision."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [*root.glob("aiakq/**/*.py"), *root.glob("kernels/**/*.py")]
        self.sources = {path.relative_to(root).as_posix(): path.read_text() for path in sorted(paths)}
        self.syntax = {name: ast.parse(text) for name, text in self.sources.items()}

    def nodes(self, *folders: str) -> Iterator[ast.AST]:
        """Yield the nodes of all modules, or of those in ``folders``."""
        for name, module in self.syntax.items():
            if not folders or name.startswith(folders):
                yield from ast.walk(module)

    def lines(self, pattern: str) -> int:
        """Return the number of lines of the files that match a shell pattern."""
        return sum(len(path.read_bytes().splitlines()) for path in self.root.glob(pattern) if path.is_file())


def _parameters(node: ast.AST) -> list[str]:
    """Return the names of the parameters of a function without ``self``; none for other nodes."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each.arg for each in every if each.arg not in ("self", "cls")]


def request_field(tree: Tree) -> int:
    """Return how often ``cache_salt``, a field of requests, is declared: as a parameter, a field or an attribute."""
    count = 0
    for node in tree.nodes("aiakq/"):
        count += _parameters(node).count("cache_salt")
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        name = getattr(target, "id", None) or getattr(target, "attr", None)
        count += name == "cache_salt"
    return count


def engine_command(tree: Tree) -> int:
    """Return the number of classes, functions and branches on a class that unload an adapter."""
    count = 0
    for node in tree.nodes("aiakq/runtime/", "aiakq/server/"):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            count += bool(re.search("unload", node.name, re.IGNORECASE))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            count += "Unload" in ast.unparse(node.args[1])
        elif isinstance(node, ast.MatchClass):
            count += "Unload" in ast.unparse(node.cls)
    return count


def executor_verb(tree: Tree) -> int:
    """Return the number of definitions of the methods and messages that switch drafts in an executor."""
    names = ("enable_drafts", "EnableDrafts", "SetDrafts", "set_drafts")
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(isinstance(node, definitions) and node.name in names for node in tree.nodes("aiakq/"))


def conditionals(tree: Tree) -> int:
    """Return how many conditions of ``runtime/engine`` and ``runtime/executor`` name a feature."""
    feature = re.compile("|".join(FEATURES.values()), re.IGNORECASE)
    tests = (ast.If, ast.IfExp, ast.While)
    return sum(
        isinstance(node, tests) and bool(feature.search(ast.unparse(node.test)))
        for node in tree.nodes("aiakq/runtime/engine/", "aiakq/runtime/executor/")
    )


def _names(module: ast.Module) -> str:
    """Return all identifiers of a module, with those it imports."""
    names: set[str] = set()
    for node in ast.walk(module):
        for field in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.add(value)
    return " ".join(sorted(names))


def files_naming(pattern: str) -> Callable[[Tree], int]:
    """Return a metric: the number of files with an identifier that matches ``pattern``."""
    feature = re.compile(pattern, re.IGNORECASE)
    return lambda tree: sum(bool(feature.search(_names(module))) for module in tree.syntax.values())


def upward_imports(tree: Tree) -> int:
    """Return the number of imports between two folders of ``runtime`` against the direction of most. The settings of a
    feature (``speculation/config.py``) are a part of the engine's configuration, which imports them.
    """
    between: Counter[tuple[str, str]] = Counter()
    for name, module in tree.syntax.items():
        parts = name.split("/")
        if parts[:2] != ["aiakq", "runtime"]:
            continue
        for node in ast.walk(module):
            target = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            if target[:2] == ["aiakq", "runtime"] and len(target) > 2 and target[3:] != ["config"]:
                between[parts[2].removesuffix(".py"), target[2]] += 1
    return sum(min(count, between[b, a]) for (a, b), count in between.items() if a < b)


def most_parameters(tree: Tree) -> int:
    """Return the most parameters of a function of ``aiakq``."""
    return max(len(_parameters(node)) for node in tree.nodes("aiakq/"))


def any_per_thousand(tree: Tree) -> float:
    """Return uses of ``Any`` in 1,000 lines."""
    uses = sum(isinstance(node, ast.Name) and node.id == "Any" for node in tree.nodes())
    return round(1000 * uses / python_lines(tree), 1)


def untyped_arguments(tree: Tree) -> int:
    """Return the reads of ``args["name"]``."""
    return sum(len(re.findall(r"\bargs\[\"", text)) for text in tree.sources.values())


def python_lines(tree: Tree) -> int:
    """Return the lines of ``aiakq`` and ``kernels``."""
    return sum(text.count("\n") for text in tree.sources.values())


def generated_lines(tree: Tree) -> int:
    """Return the number of committed lines of docs/ that are written by a program."""
    count = 0
    for page in GENERATED:
        path = tree.root / "docs" / page
        ignored = tree.root == ROOT and subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0
        if path.is_file() and not ignored:
            text = path.read_text(encoding="utf-8")
            count += len((text.partition(MODULES_HEADING)[2] if page == "structure.md" else text).splitlines())
    return count


METRICS: dict[str, Callable[[Tree], Any]] = {
    "declarations of a request field": request_field,
    "definitions and branches of an engine command": engine_command,
    "definitions of an executor verb": executor_verb,
    "conditions on features in engine/ and executor/": conditionals,
    **{f"files that name {feature}": files_naming(pattern) for feature, pattern in FEATURES.items()},
    "imports upwards in runtime/": upward_imports,
    "files in loader/": lambda tree: len(list(tree.root.glob("aiakq/runtime/loader/**/*.py"))),
    "parameters, most": most_parameters,
    "Any in 1,000 lines": any_per_thousand,
    'args["..."]': untyped_arguments,
    "lines, aiakq and kernels": python_lines,
    "lines, tests": lambda tree: tree.lines("tests/**/*.py"),
    "lines, generated pages": generated_lines,
}


def measured(revision: str | None) -> dict[str, Any]:
    """Return the metrics of a revision of the repository, or of the working tree."""
    if revision is None:
        tree = Tree(ROOT)
        return {name: count(tree) for name, count in METRICS.items()}
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(folder, filter="data")
        tree = Tree(Path(folder))
        return {name: count(tree) for name, count in METRICS.items()}


if __name__ == "__main__":
    columns = {revision or "now": measured(revision) for revision in sys.argv[1:] or [None]}
    print(f"{'':48}" + "".join(f"{name[:10]:>12}" for name in columns))
    for metric in METRICS:
        print(f"{metric:48}" + "".join(f"{column[metric]:>12}" for column in columns.values()))
