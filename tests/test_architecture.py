"""The rules of the code, read from the tree: imports go one way, files and functions stay readable, docstrings name
what exists, tests mirror the tree. Those that a linter knows are in ``pyproject.toml`` and ``.importlinter.toml``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
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
TESTS_OF_NO_PACKAGE = {"examples", "fake_cuda", "plugins", "ptx", "simulation"}

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


# --- rules: each yields what breaks it --------------------------------------------------------------------------------

RULES: dict[str, Callable[[], Iterable[str]]] = {}


def rule(check: Callable[[], Iterable[str]]) -> Callable[[], Iterable[str]]:
    RULES[check.__name__.replace("_", " ")] = check
    return check


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
    return any(ast.unparse(base).partition("[")[0].split(".")[-1] == node.name for base in node.bases)


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
def docstrings_name_what_exists() -> Iterator[str]:
    """A line of a docstring that explains a name: a parameter, a field, a key or a value of the module."""
    explained = re.compile(r"^ *(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*) {2,}\S", re.MULTILINE)
    for module, path in MODULES.items():
        nodes = list(ast.walk(tree_of(path)))
        known = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg", "name")}
        known |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for names in explained.findall(ast.get_docstring(node) or ""):
                    missing = {name.lstrip("*") for name in names.split(", ")} - known - {"returns"}
                    yield from (f"{module} {node.name}: {name}" for name in sorted(missing))


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


@rule
def what_is_imported_exists() -> Iterator[str]:
    """Also inside functions, and in the examples, which few tests run."""
    for path in [*code_files(), *sorted(ROOT.glob("docs/*.py"))]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "aiakq":
                for name in node.names:
                    if not is_there(node.module, name.name):
                        yield f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}.{name.name}"


def is_there(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.util.find_spec(f"{module}.{name}"))
    except ImportError:
        return False


@pytest.mark.parametrize("name", RULES)
def test_the_code_follows_its_rules(name):
    assert not list(RULES[name]())


def test_imports_go_one_way(tmp_path):
    """import-linter finds submodules in the folder of their package; ``aiakq.kernels`` is another folder."""
    package = tmp_path / "aiakq"
    package.mkdir()
    for path in (ROOT / "aiakq").glob("[!_]*"):
        (package / path.name).symlink_to(path)
    for name in ("__init__.py", "__main__.py"):
        (package / name).symlink_to(ROOT / "aiakq" / name)
    (package / "kernels").symlink_to(ROOT / "kernels")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    command += ["--no-logo", str(ROOT / ".importlinter.toml")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Analyzed" in done.stdout and "0 broken" in done.stdout


# --- rules that start an interpreter ----------------------------------------------------------------------------------


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


def test_no_large_file_is_in_the_repository():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    big = [
        name
        for name in done.stdout.split("\0")
        if name and (ROOT / name).is_file() and (ROOT / name).stat().st_size > 2**20
    ]
    assert set(big) <= {"examples/tinybooks/model.safetensors"}
