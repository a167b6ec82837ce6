"""The installed and released files: the native library, types, the man page, and the workflows that build it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from other_programs import check_schema
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINS = dict(
    line.strip().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
)
#: Version of torch, and what its wheels with CUDA require on Linux, as their metadata says. Those without require less.
TORCH_FOR_CUDA = "2.13.0"
CUDA_REQUIREMENTS = """
filelock
typing-extensions>=4.10.0
setuptools>=77.0.3
sympy>=1.13.3
networkx>=2.5.1
jinja2
fsspec>=0.8.5
cuda-toolkit==13.0.3
cuda-bindings<14,>=13.0.3
nvidia-cudnn-cu13==9.20.0.48
nvidia-cusparselt-cu13==0.8.1
nvidia-nccl-cu13==2.29.7
nvidia-nvshmem-cu13==3.4.5
triton==3.7.1
"""
NAME = "aiakq-0.1.0-py3-none-manylinux_2_28_x86_64.whl"


@pytest.fixture(scope="module")
def release() -> Any:
    """The script .ci/release.py as a module."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_without_compiler(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    given = {**os.environ, "CXX": "/nowhere/g++", **environment}
    return subprocess.run(words, cwd=ROOT, env=given, capture_output=True, text=True)


def test_an_installation_without_a_compiler_succeeds_unless_the_library_is_required(tmp_path):
    done = build_without_compiler(tmp_path)
    assert done.returncode == 0 and "without its native CPU kernels" in done.stderr
    done = build_without_compiler(tmp_path, AIAKQ_REQUIRE_NATIVE="1")
    assert done.returncode == 1
    assert "AIAKQ_REQUIRE_NATIVE is set, and the native CPU kernels cannot be built" in done.stderr


@pytest.fixture
def wheel(tmp_path, release):
    """``wheel(name, **changes)``: a wheel with what has to be in one, some of it replaced or (None) left out."""
    head = bytearray(64)
    head[:4], head[18] = b"\x7fELF", 62

    def make(name: str = NAME, **changes: bytes | None) -> Path:
        contents = {
            "library": (release.LIBRARY, bytes(head)),
            "types": ("aiakq/py.typed", b""),
            "playground": ("aiakq/server/playground/playground.html", b""),
            "docs": ("aiakq/server/playground/docs.html", b""),
            "man": ("aiakq-0.1.0.data/data/share/man/man1/aiakq.1", b""),
            "license": ("aiakq-0.1.0.dist-info/licenses/LICENSE", b""),
            "metadata": ("aiakq-0.1.0.dist-info/METADATA", b"See the [guide](https://example.org/guide)."),
            "other": ("aiakq/__init__.py", b""),
        }
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            for key, (file, content) in contents.items():
                given = changes.get(key, content)
                if given is not None:
                    archive.writestr(file, given)
        return path

    return make


def test_a_wheel_with_everything_passes(release, wheel):
    release.check_wheel(wheel())


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (NAME, {"library": None}, "lacks the native library"),
        (NAME, {"types": None}, "lacks py.typed"),
        (NAME, {"playground": None}, "playground.html"),
        (NAME, {"man": None}, "aiakq.1"),
        (NAME, {"license": None}, "LICENSE"),
        (NAME, {"library": b"\x7fELF" + bytes(14) + b"\xb7" + bytes(40)}, "another machine"),
        (NAME, {"library": b"\x7fELF" + bytes(14) + b"\x3e" + b"libgomp.so.1"}, "OpenMP"),
        (NAME.replace("manylinux_2_28", "linux"), {}, "not manylinux"),
        (NAME.replace("2_28", "2_39"), {}, "needs glibc"),
        (NAME.replace("py3-none", "cp311-cp311"), {}, "one Python only"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_wheel_that_lacks_something_fails(release, wheel, name, changes, said):
    with pytest.raises(SystemExit, match=said):
        release.check_wheel(wheel(name, **changes))


def test_checksums_are_those_of_the_files(release, tmp_path):
    (tmp_path / "a.whl").write_bytes(b"a")
    release.sums(tmp_path)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "a.whl: OK\n"


def test_types_and_the_man_page_are_installed():
    setuptools = PROJECT["tool"]["setuptools"]
    assert "py.typed" in setuptools["package-data"]["aiakq"] and (ROOT / "aiakq" / "py.typed").exists()
    assert setuptools["data-files"] == {"share/man/man1": ["docs/aiakq.1"]}
    own = [path.parent.relative_to(ROOT) for path in ROOT.glob("aiakq/**/__init__.py")]
    kernels = [Path("aiakq", path.parent.relative_to(ROOT)) for path in ROOT.glob("kernels/**/__init__.py")]
    folders = {str(path).replace("/", ".") for path in (*own, *kernels)}
    assert set(setuptools["packages"]) == folders


def test_the_man_page_is_clean():
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    page = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "manual.py"), "-"], capture_output=True, check=True
    ).stdout
    done = subprocess.run(["groff", "-man", "-ww", "-z", "-Tutf8"], input=page.decode(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def unmet(requirements: Iterable[str]) -> list[str]:
    """The requirements that apply here and that the pins of constraints.txt do not meet."""
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PINS.items()}
    found = [Requirement(requirement) for requirement in requirements]
    return [
        f"{requirement}, but it is pinned to {pins[name]}"
        for requirement in found
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and (name := re.sub(r"[-_.]+", "-", requirement.name).lower()) in pins
        and not requirement.specifier.contains(pins[name], prereleases=True)
    ]


def test_pins_are_those_that_torch_with_cuda_requires():
    assert PINS["torch"] == TORCH_FOR_CUDA, "record what the wheels of this torch with CUDA require"
    assert unmet(CUDA_REQUIREMENTS.split()) == []


def test_pins_fit_each_other():
    installed = {d.name: d for d in importlib.metadata.distributions()}
    compared = [name for name, version in PINS.items() if name in installed and installed[name].version == version]
    assert len(compared) > 40
    problems = {name: unmet(installed[name].requires or []) for name in compared}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_the_pythons_of_the_workflow_are_those_that_the_package_names():
    named = [each.rsplit(" ")[-1] for each in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", each)]
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release["jobs"]["test"]["strategy"]["matrix"]["python"] == named == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_valid_and_ask_for_no_more_than_they_need(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    check_schema("vendor.github-workflows", path)


def test_only_the_last_step_of_a_release_may_publish():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    privileged = {name for name, job in jobs.items() if job.get("permissions", {}).get("id-token") == "write"}
    assert privileged == {"attest", "publish"}
    assert set(jobs["publish"]["needs"]) >= {"test", "attest"} and jobs["publish"]["environment"] == "pypi"
