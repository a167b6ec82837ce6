"""The files for Ray: the batch engine generates text, and the RayService uses valid options."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from aiakq import LLM, SamplingParams
from aiakq.arguments.server import checked

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "ray"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_batch_is_answered_as_by_one_llm(example_model):
    pytest.importorskip("ray.data", reason="ray is not installed: pip install 'aiakq[ray]'")
    answer = load("batch").Answer(str(example_model), 6)
    batch = answer({"id": [1, 2], "prompt": ["The", "It was"]})
    expected = LLM(str(example_model)).generate(
        ["The", "It was"], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
    )
    assert batch["id"] == [1, 2] and batch["answer"] == [result.outputs[0].text for result in expected]


def test_the_service_has_a_bundle_and_a_pod_for_each_rank(example_model):
    service, policy = yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text())
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    arguments = application["args"]
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    ranks = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["replicas"] == ranks * arguments.pop("num_replicas")
    assert container["resources"]["limits"]["cpu"] == str(arguments.pop("cpus_per_rank"))
    assert checked({**arguments, "model": str(example_model)}, server=True).pipeline_parallel_size == 2
    assert policy["kind"] == "NetworkPolicy"
    module, _, function = application["import_path"].partition(":")
    assert f"def {function}(" in (FOLDER / f"{module}.py").read_text()


def test_the_application_reserves_a_bundle_for_each_rank(example_model):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'aiakq[ray]'")
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        pytest.skip("Ray Serve is not installed: pip install 'ray[serve]'")
    bound = load("serve_app").build({"model": "m", "tensor_parallel_size": 2, "cpus_per_rank": 3, "num_replicas": 4})
    deployment = bound._bound_deployment
    assert deployment.num_replicas == 4
    assert deployment._replica_config.placement_group_bundles == [{"CPU": 3}] * 2
