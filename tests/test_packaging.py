"""What is installed and released: the native library, types, the man page, and the workflows that build it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from other_programs import check_schema

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
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


def test_an_installation_without_a_compiler_goes_on_unless_the_library_is_required(tmp_path):
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
    words = ["groff", "-man", "-ww", "-z", "-Tutf8", str(ROOT / "docs" / "aiakq.1")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


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
