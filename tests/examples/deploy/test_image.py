"""The Containerfile, and an image built from it if AIAKQ_CONTAINER names one."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from other_programs import printed_by

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "deploy"
CONTAINERFILE = (FOLDER / "Containerfile").read_text()
IMAGE = os.environ.get("AIAKQ_CONTAINER", "")


def test_an_image_keeps_its_promises(example_model):
    engine = os.environ.get("AIAKQ_IMAGE_ENGINE", "podman")
    if not IMAGE or shutil.which(shlex.split(engine)[0]) is None:
        pytest.skip("AIAKQ_CONTAINER names no image, or there is no podman")
    command = [sys.executable, str(FOLDER / "check_image.py"), IMAGE, "--model", str(example_model), "--engine", engine]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds_to_ready"] < 60


def requirements(*words: str) -> list[str]:
    command = [sys.executable, str(FOLDER / "requirements.py"), "--file", str(ROOT / "pyproject.toml"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_an_image_holds_what_serving_needs_and_no_data_sets():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left_out = {"datasets>=3.0", "accelerate>=1.0"}
    traces = project["optional-dependencies"]["traces"]
    assert set(requirements()) == {*project["dependencies"], *traces} - left_out
    assert set(requirements("--device", "gpu")) - set(requirements()) == {*project["optional-dependencies"]["gpu"]}


def test_serving_imports_nothing_that_the_image_lacks():
    code = (
        "import sys, aiakq.server.launch, aiakq.server.process.engine_process, aiakq.server.process.text_process;"
        "from aiakq import LLM; print({'datasets', 'accelerate', 'pandas', 'pyarrow'} & sys.modules.keys())"
    )
    assert printed_by(code) == "set()"


def stage(name: str) -> str:
    """The lines of a stage of the Containerfile."""
    return re.split(r"^FROM ", CONTAINERFILE.partition(f" AS {name}\n")[2], maxsplit=1, flags=re.M)[0]


def test_the_image_for_a_gpu_can_compile_kernels_and_keep_them():
    """A root file system that is read-only, and a /tmp from which nothing can be executed, leave the volume."""
    gpu, [cache] = stage("runtime-gpu"), re.findall(r"\bTRITON_CACHE_DIR=(\S+)/triton ", stage("runtime-gpu"))
    assert f"\nVOLUME {cache}\n" in gpu and f"\nCOPY --from=build {cache} {cache}\n" in gpu
    assert re.search(r"apt-get install .* gcc libc6-dev\b", gpu)
    # Triton notes absolute paths: the kernels are compiled where they are used.
    assert re.search(rf"TRITON_CACHE_DIR={cache}/triton \S+ -P -m aiakq\.kernels\.triton\.precompile;", stage("build"))
    assert re.search(rf"chown -R 10001:0 {cache} ", stage("build")) and "\nFROM runtime-${DEVICE}\n" in CONTAINERFILE
    assert "VOLUME" not in stage("runtime-cpu") and "/tmp" not in cache


def test_what_is_copied_exists_and_is_not_ignored():
    kept = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line.split()[1:-1] for line in CONTAINERFILE.splitlines() if re.match(r"COPY (?!--from)", line)]
    assert {name for names in copied for name in names} == kept
    assert all((ROOT / name).exists() for name in kept)


def test_options_of_the_image_exist():
    from aiakq.arguments.environment import unknown_variables

    names = set(re.findall(r"\b(AIAKQ_\w+)=", CONTAINERFILE))
    assert {"AIAKQ_MODEL", "AIAKQ_API_KEY_FILE", "AIAKQ_REQUIRE_NATIVE"} <= names and unknown_variables(names) == []


def test_the_image_runs_without_root_and_keys_come_from_a_file():
    final = CONTAINERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001:0$", final, re.M) and "AIAKQ_API_KEY=" not in final
    assert "/live" in final and re.search(r'^ENTRYPOINT \["aiakq"\]$', final, re.M)
