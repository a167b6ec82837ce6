"""The rules of the house, read from the tree: imports go one way and never in a circle, files and functions stay
readable, tests mirror the tree.

What does not follow a rule yet is listed in ``house_exceptions.txt``, one per line. The list only shrinks: a new
violation fails, and so does a line that is no longer needed. ``python tests/test_house.py`` removes those lines.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from other_programs import printed_by

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("aiakq/**/*.py"), *ROOT.glob("kernels/**/*.py")])
EXCEPTIONS = Path(__file__).with_name("house_exceptions.txt")

#: Layers, highest first. A module imports from layers below its own, and from its own package.
LAYERS = [
    {"aiakq", "aiakq.cli", "aiakq.terminal", "aiakq.__main__"},
    {"aiakq.server", "aiakq.bench", "aiakq.quantizers"},
    {"aiakq.evaluation"},
    {"aiakq.runtime"},
    {"aiakq.formats", "aiakq.data"},
    {"aiakq.registry"},
    {"aiakq.kernels"},
    {"aiakq.arguments", "aiakq.spec", "aiakq.records"},
    {"aiakq.patterns", "aiakq.system"},
    {"aiakq.errors", "aiakq.__version__"},
]
#: Modules that import nothing but the standard library and each other, and what else each may.
STANDARD_LIBRARY_ONLY: dict[str, set[str]] = {
    "aiakq.spec": set(),
    "aiakq.errors": set(),
    "aiakq.patterns": {"regex"},  # re has no time limit
    "aiakq.registry": set(),
    "aiakq.kernels.registry": set(),
    "aiakq.arguments": set(),
    "aiakq.system": {"psutil", "msgspec"},
}
#: Folders of tests/ that hold no tests of one package.
TESTS_OF_NO_PACKAGE = {"examples", "plugins", "simulation"}

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_IMPORTS = 15


# --- the tree ---------------------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels":
        parts.insert(0, "aiakq")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


MODULES = {module_name(path): path for path in SOURCES}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def within(module: str, package: str) -> bool:
    return (module + ".").startswith(package + ".")


def imported_names(path: Path) -> set[str]:
    """Everything ``path`` imports, at any depth: ``from a import b`` gives a and a.b."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module}, (f"{node.module}.{alias.name}" for alias in node.names))
    return found


@functools.cache
def imported_modules(module: str) -> frozenset[str]:
    """The modules of ours that ``module`` imports, at any depth, also for types only."""
    found = set()
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
    return frozenset(found & MODULES.keys() - {module})


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file and its qualified name; those inside another function belong to it."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try | ast.With):
                yield from visit(child, prefix)

    return visit(tree_of(path), "")


# --- rules: each gives what breaks it, as lines of house_exceptions.txt -------------------------------------------

RULES: dict[str, Callable[[], Iterable[str]]] = {}


def rule(check: Callable[[], Iterable[str]]) -> Callable[[], Iterable[str]]:
    RULES[check.__name__.replace("_", " ")] = check
    return check


def layer_of(module: str) -> tuple[int, str]:
    """The layer and the package of the longest name in LAYERS that is ``module`` or holds it."""
    return max(
        ((layer, name) for layer, names in enumerate(LAYERS) for name in names if within(module, name)),
        key=lambda found: len(found[1]),
    )


@rule
def imports_go_down() -> Iterator[str]:
    for module, path in MODULES.items():
        layer, package = layer_of(module)
        for name in sorted(imported_names(path)):
            if not name.startswith("aiakq."):
                continue
            below, other = layer_of(name)
            if not (layer < below or package == other or package == "aiakq" or layer == below == 0):
                if name in MODULES:
                    yield f"{module} imports {name}"


@rule
def imports_make_no_circle() -> Iterator[str]:
    for circle in circles({module: imported_modules(module) for module in MODULES}):
        yield " -> ".join(circle)


@rule
def sibling_packages_do_not_import_each_other() -> Iterator[str]:
    edges = set()
    for module in MODULES:
        for other in imported_modules(module):
            package, target = (name if name in PACKAGES else name.rpartition(".")[0] for name in (module, other))
            if not within(package, target) and not within(target, package):
                edges.add((package, target))
    yield from (f"{one} <-> {other}" for one, other in sorted(edges) if one < other and (other, one) in edges)


@rule
def the_engine_reaches_no_torch() -> Iterator[str]:
    """Modules that runtime.engine imports, directly or not, for types or not, and that import torch."""
    reached: set[str] = set()
    todo = {module for module in MODULES if within(module, "aiakq.runtime.engine")}
    while todo:
        module = todo.pop()
        reached.add(module)
        todo |= imported_modules(module) - reached
    for module in sorted(reached):
        if {"torch", "triton"} & {name.split(".")[0] for name in imported_names(MODULES[module])}:
            yield module


@rule
def some_packages_need_the_standard_library_only() -> Iterator[str]:
    for module, path in MODULES.items():
        for package, also in STANDARD_LIBRARY_ONLY.items():
            if within(module, package):
                outside = {name.split(".")[0] for name in imported_names(path)}
                outside -= set(sys.stdlib_module_names) | {"aiakq"} | also
                yield from (f"{module} imports {name}" for name in sorted(outside))


@rule
def files_can_be_read_in_one_sitting() -> Iterator[str]:
    for path in code_files():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{path.relative_to(ROOT)} {lines}"


@rule
def functions_are_short() -> Iterator[str]:
    for path in code_files():
        for name, function in functions(path):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{path.relative_to(ROOT)} {name} {lines}"


@rule
def modules_import_few_others() -> Iterator[str]:
    for module in MODULES:
        # Records that only describe what travels are one import, however many files they are in.
        imported = {re.sub(r"^(aiakq\.runtime\.protocol)\..*", r"\1", name) for name in imported_modules(module)}
        if len(imported) > MAX_IMPORTS:
            yield f"{module} {len(imported)}"


@rule
def only_the_console_prints() -> Iterator[str]:
    for module, path in MODULES.items():
        if module not in ("aiakq.cli", "aiakq.terminal.console"):
            calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
            if any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls):
                yield module


@rule
def public_classes_have_names_of_their_own() -> Iterator[str]:
    names = Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not extends_namesake(node)
    )
    yield from (f"{name} {times}" for name, times in sorted(names.items()) if times > 1)


def extends_namesake(node: ast.ClassDef) -> bool:
    """Whether a class extends the class of its name of another module."""
    return any(ast.unparse(base).split(".")[-1] == node.name for base in node.bases)


@rule
def public_tensor_functions_state_their_shapes() -> Iterator[str]:
    """Functions whose annotations name Tensor: the docstring gives a shape, like [M, K].

    A method without a docstring that overrides one of its module has that one's.
    """
    for module, path in MODULES.items():
        if not within(module, "aiakq.kernels") and not within(module, "aiakq.runtime"):
            continue
        names = {name for name, _ in functions(path)}
        bases = {
            node.name: [ast.unparse(base) for base in node.bases]
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ClassDef)
        }
        for name, function in functions(path):
            owner, _, method = name.rpartition(".")
            if ast.get_docstring(function) is None and any(
                f"{base}.{method}" in names for base in bases.get(owner, ())
            ):
                continue
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            annotations = [argument.annotation for argument in arguments] + [function.returns]
            takes_tensors = any(re.search(r"\bTensor\b", ast.unparse(each)) for each in annotations if each)
            private = any(part.startswith("_") for part in name.split("."))
            if takes_tensors and not private and not re.search(r"\[.+?\]", ast.get_docstring(function) or ""):
                yield f"{module} {name}"


@rule
def the_tests_mirror_the_tree() -> Iterator[str]:
    sources = {
        (name.removeprefix("aiakq.") if name != "aiakq" else "").replace(".", "/")
        for name in PACKAGES
        if name != "aiakq"
    }
    tests = {str(path.parent.relative_to(ROOT / "tests")) for path in ROOT.glob("tests/**/test_*.py")} - {"."}
    tests |= {str(parent) for folder in tests for parent in Path(folder).parents} - {"."}
    tests -= {folder for folder in tests if folder.split("/")[0] in TESTS_OF_NO_PACKAGE}
    yield from (f"tests/{folder} is no package" for folder in sorted(tests - sources))
    for package in sorted(sources - tests):
        folder, _, name = package.rpartition("/")
        if not (ROOT / "tests" / folder / f"test_{name}.py").exists():
            yield f"{package} has no tests"


def code_files() -> list[Path]:
    return [*SOURCES, *sorted(ROOT.glob("tests/**/*.py")), *sorted(ROOT.glob("examples/**/*.py"))]


def circles(graph: dict[str, frozenset[str]]) -> Iterator[list[str]]:
    """One shortest circle through the first module of every strongly connected set of modules."""
    seen: set[str] = set()
    for start in sorted(graph):
        if start in seen:
            continue
        before: dict[str, str] = {}
        todo = [start]
        while todo and start not in before:
            here = todo.pop(0)
            for there in sorted(graph[here]):
                if there not in before:
                    before[there] = here
                    todo.append(there)
        if start in before:
            circle = [start]
            while circle[0] != start or len(circle) == 1:
                circle.insert(0, before[circle[0]])
            seen.update(circle)
            yield circle


# --- the list of exceptions -------------------------------------------------------------------------------------------


def listed(name: str) -> list[str]:
    """The exceptions to the rule ``name``."""
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")]


def without_number(line: str) -> str:
    return re.sub(r" \d+$", "", line)


def number(line: str) -> int:
    found = re.search(r" (\d+)$", line)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("name", RULES)
def test_the_house_follows_its_rules(name):
    allowed = {without_number(line): number(line) for line in listed(name)}
    found = {without_number(line): number(line) for line in RULES[name]()}
    broken = [f"{line} {count or ''}".strip() for line, count in found.items() if count > allowed.get(line, -1)]
    assert not broken, f"rule '{name}' is broken:\n" + "\n".join(broken)
    done = [line for line in allowed if line not in found]
    assert not done, f"no exception to '{name}' any more; run python tests/test_house.py:\n" + "\n".join(done)


def test_every_line_of_the_exceptions_belongs_to_a_rule():
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    assert {line.partition(": ")[0] for line in lines} <= set(RULES)
    assert not [line for line, times in Counter(lines).items() if times > 1]


def test_a_circle_of_imports_is_found():
    graph = {"a": "b", "b": "c", "c": "bd", "d": "", "e": "a"}
    assert list(circles({module: frozenset(others) for module, others in graph.items()})) == [["b", "c", "b"]]


def shrink() -> None:
    """Drop exceptions that are no longer needed, and lower the numbers of the others."""
    kept = []
    for name, check in RULES.items():
        found = {without_number(line): line for line in check()}
        for line in listed(name):
            now = found.get(without_number(line))
            if now is not None:
                kept.append(f"{name}: {min(line, now, key=number)}")
    EXCEPTIONS.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


# --- what a list cannot say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_every_module_imports_and_says_what_it_is(path):
    module = importlib.import_module(module_name(path))
    if path.read_text().strip():
        assert module.__doc__, "a module opens with what it is for"


def test_importing_aiakq_loads_nothing_heavy():
    code = (
        "import sys, aiakq, aiakq.cli, aiakq.spec, aiakq.errors, aiakq.registry, aiakq.arguments.server; "
        "print([m for m in ('torch', 'transformers', 'importlib.metadata') if m in sys.modules])"
    )
    assert printed_by(code) == "[]"


def test_importing_the_engine_loads_no_torch():
    modules = sorted(module for module in MODULES if within(module, "aiakq.runtime.engine"))
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    assert printed_by(code) == "False"


def test_packages_in_pyproject_are_all_there_are():
    import tomllib

    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(packages) == PACKAGES


def test_nothing_heavy_is_a_file_nobody_asked_for():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    big = [
        name
        for name in done.stdout.split("\0")
        if name and (ROOT / name).is_file() and (ROOT / name).stat().st_size > 2**20
    ]
    assert set(big) <= {"examples/tinybooks/model.safetensors"}


if __name__ == "__main__":
    shrink()
