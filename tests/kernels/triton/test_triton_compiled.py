"""Every launch configuration compiled for GPUs that are not there: it fits, nothing is spilled, loads run ahead.

Instructions per weight are what decides at small batches (docs/performance.md): more than were recorded fail.
KERNEL_COMPILE=quick compiles each kernel only a few times (``make test``, and ``make triton`` for another Triton).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lanes import in_shard
from packaging.version import Version

from aiakq.kernels.triton import configs

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels" / "triton"
QUICK = os.environ.get("KERNEL_COMPILE") == "quick"
TRITON = importlib.metadata.version("triton")
#: Instructions per weight by version of Triton.
RECORDED: dict[str, dict[str, float]] = json.loads((HERE / "instructions.json").read_text())
#: Bytes of registers that latent attention on Hopper spills with Triton 3.9 and newer; all else spills none.
SPILLED_BY_LATENTS = 640
#: Kernels that GPUs before sm_89 have not.
SINCE_89 = {"fp8_kernel", "experts_fp8_kernel", "quantize_e4m3_kernel"}
#: For which instructions are counted: nobody has run kernels for the others.
COUNTED = (80, 89, 90)


def limit(name: str) -> float:
    """The most instructions per weight of a kernel: those of this version of Triton, and a little more; if it was not
    recorded, those of the newest older one, and more than a little.
    """
    versions = sorted((version for version in RECORDED if name in RECORDED[version]), key=Version)
    older = [version for version in versions if Version(version) <= Version(TRITON)] or versions[:1]
    assert older, f"{name} was never recorded"
    return RECORDED[older[-1]][name] * (1.05 if older[-1] == TRITON else 1.2)


# All of it is compiled at the first run, about a second each; after that Triton remembers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def made(request) -> list[dict]:
    """What compile_all.py says, in a process where Triton compiles and does not interpret.

    CI compiles every configuration where this file is in its shard of the rest, and else a few of each kernel.
    """
    config = request.config
    whole = config.getoption("--lane") == "ci" and in_shard(request.node.nodeid, config.getoption("--shard"), {})
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_all.py"), *["--quick"] * (QUICK and not whole)],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_kernel_is_compiled_for_every_architecture(made):
    kernels = {
        name
        for file in KERNELS.glob("*_kernel.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)
    }
    found = {(kernel["kernel"], kernel["arch"]) for kernel in made}
    if QUICK:
        multiplying = {kernel["kernel"] for kernel in made if kernel["matrix"]}
        assert len(multiplying) >= 9
        everywhere = {(k, arch) for k in multiplying for arch in (80, 100, 120) if arch >= 89 or k not in SINCE_89}
        assert {(k, 90) for k in kernels} | everywhere <= found
    else:
        archs = (80, 89, 90, 100, 120)
        assert found == {(k, arch) for k in kernels for arch in archs if arch >= 89 or k not in SINCE_89}


def test_every_launch_file_is_compiled(made):
    """Those of architectures, by what they say; there are none of a GPU alone."""
    archs = {f"sm_{kernel['arch']}" for kernel in made} | {"sm_89"}
    assert {file.stem for file in (KERNELS / "launch").glob("*.json")} <= {"default", *archs}


def test_launches_are_those_of_the_architecture():
    """Of a GPU without a file of its own: that of its architecture, and of other kernels the default."""
    for file in (KERNELS / "launch").glob("sm_*.json"):
        found = configs.table(configs.DEFAULT, int(file.stem.removeprefix("sm_")))
        own = json.loads(file.read_text())
        assert own and found == json.loads((file.parent / "default.json").read_text()) | own


def test_no_bound_of_an_inner_loop_is_lost(made):
    """Triton removes values that a loop carries if only bounds of inner loops use them; the inner loops then start, or
    end, at the initial value in every iteration."""
    for kernel in made:
        before, after = kernel["bounds"]
        assert after == before, kernel["name"]
    # What the outer loop over saved states changes: where the loop over tokens starts and where it ends.
    assert {tuple(kernel["bounds"]) for kernel in made if kernel["kernel"] == "recurrence_kernel"} == {(2, 2)}


def test_every_configuration_fits(made):
    for kernel in made:
        assert kernel["shared"] <= kernel["most_shared"], kernel
        # Of 512 columns, Triton makes a kernel that needs more a trap.
        assert kernel["columns"] <= 512 and not kernel["trap"], kernel
        newer = kernel["kind"] == "latent" and kernel["arch"] == 90 and Version(TRITON) >= Version("3.9")
        assert kernel["registers"] <= 255 and kernel["stack"] <= newer * SPILLED_BY_LATENTS, kernel


def test_nothing_is_computed_in_64_bits(made):
    for kernel in made:
        assert not kernel["double"], kernel


def test_lost_bounds_are_seen_in_the_text(monkeypatch):
    """Of a loop that starts where the previous iteration of the outer loop ended, and of what becomes of it."""
    monkeypatch.syspath_prepend(HERE)
    from loops import varying_bounds

    carried = """
    %out:2 = scf.for %i = %zero to %count step %one iter_args(%sum = %none, %begin = %zero) -> (f32, i32)  : i32 {
      %at = tt.addptr %ends, %i : !tt.ptr<i32>, i32 loc(#loc1)
      %end = tt.load %at : !tt.ptr<i32> loc(#loc2)
      %late = scf.if %flag -> (i32) {
        scf.yield %begin : i32 loc(#loc3)
      } else {
        scf.yield %zero : i32 loc(#loc3)
      } loc(#loc3)
      %inner = scf.for %j = START to %end step %one iter_args(%acc = %sum) -> (f32)  : i32 {
        %next = arith.addf %acc, %acc : f32 loc(#loc4)
        scf.yield %next : f32 loc(#loc4)
      } {tt.num_stages = 3 : i32} loc(#loc5)
      scf.yield %inner, %end : f32, i32 loc(#loc6)
    } loc(#loc6)
    scf.for %k = %zero to %out#1 step %one  : i32 {
    } loc(#loc7)
    """
    assert varying_bounds(carried.replace("START", "%begin")) == varying_bounds(carried.replace("START", "%late")) == 2
    assert varying_bounds(carried.replace("START", "%zero")) == 1


def test_loads_in_main_loops_run_ahead(made):
    """cp.async, not loads that are waited for; but numbers of pages may be where prompts have two stages, too few for
    loads that depend on each other. Such launches were chosen by their times on an H200.
    """
    for kernel in made:
        if kernel["matrix"]:
            assert kernel["loop"]["LDGSTS"], kernel
            assert "LDG" not in kernel["loop"] or kernel["kernel"] in ("prefill_kernel", "scan_kernel"), kernel


def test_recurrences_load_tokens_ahead(made):
    """Their loops have no matrices, but wait for no load either."""
    recurrences = [kernel for kernel in made if kernel["kernel"] == "recurrence_kernel"]
    assert len(recurrences) == (1 if QUICK else 10) and all(kernel["copies"] >= 9 for kernel in recurrences)


def test_the_tensor_core_that_is_meant_multiplies(made):
    for kernel in made:
        # For integers on sm_100, Triton has used the new instruction since 3.9.
        newer = f"UTC{kernel['matrix']}" if kernel["arch"] == 100 else kernel["matrix"]
        assert not kernel["matrix"] or kernel["loop"].keys() & {kernel["matrix"], newer}, kernel


def test_products_of_tensor_cores_follow_each_other(made):
    """ptxas makes Hopper's products wait for each other where registers of the sums are also set in another way, by a
    loop that may end before its first turn, for instance: it then waits more often than Triton asked it to."""
    waiting = [kernel["name"] for kernel in made if kernel["waits"][1] > kernel["waits"][0]]
    assert not waiting


def test_instructions_are_no_more_than_recorded(made):
    """Recorded by ``python tests/kernels/triton/compile_all.py --record`` for each version of Triton."""
    counted = [kernel for kernel in made if kernel["arch"] in COUNTED]
    assert QUICK or {kernel["name"] for kernel in counted} == set().union(*RECORDED.values())
    for kernel in counted:
        most = limit(kernel["name"])
        assert kernel["per_weight"] <= most, (kernel["name"], kernel["per_weight"], most)


def test_the_main_one_is_within_its_budget(made):
    few = [
        kernel for kernel in made if kernel["arch"] == 90 and kernel["kind"] == "w4a16 g128" and kernel["rows"] <= 16
    ]
    # At 16 rows, the launch that was fastest on an H200 has a few more.
    assert (QUICK or few) and all(kernel["per_weight"] <= (2 if kernel["rows"] <= 8 else 2.7) for kernel in few)


def test_decoding_over_caches_of_eight_bits_is_within_its_budget(made):
    """Seven instructions for each element are what an H200 can issue while one arrives."""
    cached = [
        kernel
        for kernel in made
        if kernel["arch"] == 90 and kernel["kind"] == "decode" and "bf16" not in kernel["name"]
    ]
    assert (QUICK or len(cached) == 3) and all(kernel["per_weight"] <= 7 for kernel in cached)
