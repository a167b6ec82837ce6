"""What a package adds through entry points runs like what is built in: the same commands, the same tests."""

from __future__ import annotations

import json

import httpx

from aiakq.server.background import start_in_background

ARCHITECTURE = "ArceeForCausalLM"


def test_a_family_gives_the_tokens_of_transformers_and_counts_its_tensors(run_tests):
    suites = ["tests/runtime/engine/test_exactness.py", "tests/formats/test_inventory.py"]
    assert run_tests(*suites, "-k", ARCHITECTURE) == 2


def test_without_the_plugin_its_family_is_not_native(tiny_model, aiakq):
    folder = tiny_model(ARCHITECTURE)
    ended = aiakq("bench", "latency", str(folder), "--model-impl", "aiakq")
    assert ended.code == 3 and "ArceeForCausalLM is not supported" in ended.last


def test_a_format_holds_what_the_formats_of_the_tree_hold(run_tests):
    """Writing and reading, bit for bit, and refusals, over the registry; weights drawn by hypothesis among them."""
    suites = ["tests/formats/test_layouts.py", "tests/formats/test_odd_files.py", "tests/formats/test_fuzz.py"]
    cases = (
        "test_a_missing_tensor and unpacked or test_a_scale_of_zero and unpacked or test_write_then_read_is_bit_exact"
    )
    assert run_tests(*suites, "-k", cases) == 4


def test_a_route_is_served_and_in_the_openapi_document(plugin_folder, example_model, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(plugin_folder))
    arguments = {"model": str(example_model), "dtype": "float32", "num_gpu_blocks_override": 129}
    with (
        start_in_background(arguments, timeout=240) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        text = "The whale"
        count = http.post("/count_tokens", json={"text": text}).json()["count"]
        assert count == len(http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])
        refused = http.post("/count_tokens", json={"words": text})
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
        route = http.get("/openapi.json").json()["paths"]["/count_tokens"]["post"]
        assert route["summary"] == "The number of tokens of a text, without special tokens."
        assert "CountTokensRequest" in json.dumps(route["requestBody"])


def test_a_workload_is_measured_by_its_name(run, tiny_model):
    words = ["--workload", "shared-prefix", "--num-prompts", "6", "--input-len", "64", "--output-len", "3"]
    model = tiny_model("LlamaForCausalLM")
    engine = ["--dtype", "float32", "--block-size", "16", "--max-num-seqs", "1"]
    document = json.loads(run("-m", "aiakq", "bench", "throughput", model, *words, *engine).stdout)
    assert document["config"]["workload"] == "shared-prefix"
    assert (document["completed"], document["total_input_tokens"]) == (6, 6 * 64)
    assert document["prefix_cache"]["hits"] == 5 * 32 and document["warnings"] == []
