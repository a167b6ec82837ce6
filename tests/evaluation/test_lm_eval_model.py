"""The engine as lm-eval calls it."""

from aiakq.evaluation.lm_eval_model import generation_limits


def test_generation_settings_of_tasks() -> None:
    greedy = {"until": ["\n", ""], "max_gen_toks": 16, "do_sample": False, "temperature": 0.7}
    assert generation_limits(greedy) == (["\n"], 16, {"temperature": 0.0})
    assert generation_limits({"until": "."}) == (["."], 256, {"temperature": 0.0})
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    assert generation_limits(sampled) == ([], 256, {"temperature": 0.7, "top_p": 0.9})
