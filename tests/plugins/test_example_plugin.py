"""What a package adds through entry points runs like what is built in: the same commands, the same tests."""

from __future__ import annotations

ARCHITECTURE = "ArceeForCausalLM"


def test_a_family_gives_the_tokens_of_transformers_and_counts_its_tensors(run_tests):
    suites = ["tests/runtime/engine/test_exactness.py", "tests/formats/test_inventory.py"]
    assert run_tests(*suites, "-k", ARCHITECTURE) == 2


def test_without_the_plugin_its_family_is_not_native(tiny_model, aiakq):
    folder = tiny_model(ARCHITECTURE)
    ended = aiakq("bench", "latency", str(folder), "--model-impl", "aiakq")
    assert ended.code == 3 and "ArceeForCausalLM is not supported" in ended.last
