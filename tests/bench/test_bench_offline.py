"""``bench latency`` and ``bench throughput`` with a real engine."""

from __future__ import annotations

import json

import pytest
from replay_proposer import FREE, planner_of

from aiakq.bench import latency, offline, throughput
from aiakq.bench.offline import MeasuredEngine
from aiakq.bench.workload import WorkloadRequest
from aiakq.cli import main
from aiakq.runtime.engine import loop
from aiakq.runtime.speculation import step_costs


@pytest.fixture
def engine(tiny_model) -> dict:
    """Engine arguments of a small random model."""
    return {"model": str(tiny_model("LlamaForCausalLM")), "dtype": "float32", "num_gpu_blocks_override": 129}


def recorder(stages: list):
    return lambda stage, done, total: stages.append((stage, done, total))


class Steps:
    """A clock of which a millisecond passes whenever the engine reads it, at the start and the end of a step."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now

    def perf_counter(self) -> float:
        return self.now


def test_latency_times_every_batch(engine, monkeypatch):
    clock = Steps()
    for module in (loop, offline):
        monkeypatch.setattr(module, "time", clock)
    stages: list = []
    options = latency.LatencyOptions(engine, input_len=20, output_len=6, batch_size=3, iterations=4, warmups=1)
    document = latency.run(options, recorder(stages)).document()
    assert len(document["latencies"]) == 4
    assert document["avg_latency"] == pytest.approx(sum(document["latencies"]) / 4)
    assert document["latency_ms"]["mean"] == pytest.approx(1000 * document["avg_latency"])
    assert document["percentiles"]["50"] == pytest.approx(document["latency_ms"]["p50"] / 1000)
    assert document["output_throughput"] == pytest.approx(4 * 3 * 6 / sum(document["latencies"]))
    assert 0 < document["ttft_ms"]["mean"] < document["latency_ms"]["mean"]
    # A batch takes its first token and five more.
    whole = document["ttft_ms"]["mean"] + 5 * document["tpot_ms"]["mean"]
    assert whole == pytest.approx(document["latency_ms"]["mean"], rel=0.2)
    assert document["prefix_cache"]["hits"] == 0 and document["warnings"] == []
    assert document["environment"]["engine"]["dtype"].startswith("float32")
    assert stages[0] == ("load", 0, 1) and stages[-1] == ("measure", 4, 4)


def test_throughput_counts_every_token(engine):
    options = throughput.ThroughputOptions(engine, num_prompts=7, input_len=33, output_len=5)
    document = throughput.run(options, recorder([])).document()
    assert (document["completed"], document["failed"], document["num_requests"]) == (7, 0, 7)
    assert (document["total_input_tokens"], document["total_output_tokens"]) == (7 * 33, 7 * 5)
    assert document["tokens_per_second"] == pytest.approx(7 * 38 / document["elapsed_time"])
    assert document["prefix_cache"]["hit_rate"] == 0


def test_the_seed_repeats_the_prompts_and_is_new_by_default(engine, tmp_path):
    def run(seed):
        options = throughput.ThroughputOptions(engine, num_prompts=1, input_len=4, output_len=1, seed=seed)
        return throughput.run(options, recorder([])).document()["seed"]

    assert run(5) == 5
    assert run(None) != run(None)


def test_throughput_on_a_dataset(engine, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("The whale\nA lantern in the fog\n")
    options = throughput.ThroughputOptions(engine, num_prompts=5, output_len=4, dataset=path)
    document = throughput.run(options, recorder([])).document()
    assert document["completed"] == 5 and document["config"]["dataset"] == str(path)
    assert any("fewer prompts" in text for text in document["warnings"])


@pytest.mark.parametrize(
    "words",
    [["latency", "--num-iters", "2", "--batch-size", "2"], ["throughput", "--num-prompts", "4"]],
    ids=lambda words: words[0],
)
def test_commands_print_one_document(engine, tmp_path, capsys, words):
    path = tmp_path / "result.json"
    more = ["--input-len", "12", "--output-len", "3", "--num-warmups", "0", "--dtype", "float32", "--output", str(path)]
    assert main(["bench", *words, engine["model"], *more, "--fail-if", "output_throughput<0.001"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["kind"] == words[0] and document == json.loads(path.read_text())
    assert "gate passed" in err and "milliseconds" in err


def test_a_prompt_beyond_the_context_is_one_line(engine, capsys):
    words = ["bench", "latency", engine["model"], "--input-len", "600", "--output-len", "8", "--dtype", "float32"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "error[context_length_exceeded]" in err.splitlines()[-1]


@pytest.fixture
def drafting(engine, monkeypatch) -> dict:
    """Engine arguments with n-gram lookup, whose draft tokens take no time."""
    monkeypatch.setattr(step_costs, "measure_step_costs", lambda *arguments: FREE)
    return {**engine, "speculative_model": "[ngram]"}


def test_a_run_tells_acceptance_and_the_speed_up_against_no_drafts(drafting):
    # A random model repeats itself sooner or later.
    options = latency.LatencyOptions(
        drafting, input_len=8, output_len=400, batch_size=4, iterations=2, warmups=0, compare_speculation=True, seed=0
    )
    document = latency.run(options, recorder([])).document()
    found = document["speculation"]
    assert found["num_draft_tokens"] > found["num_accepted_tokens"] > 0
    assert found["acceptance_rate"] == found["num_accepted_tokens"] / found["num_draft_tokens"]
    assert sum(found["acceptance_by_position"]) == pytest.approx(found["acceptance_length"] - 1)
    assert 0 < found["tokens_per_step"] <= 4 * 5
    assert found["speedup"] > 0 and found["output_throughput_without"] > 0
    assert len(found["speedups"]) == 2 and found["speedup"] == pytest.approx(sum(found["speedups"]) / 2)
    assert found["speedup_interval"]["low"] < found["speedup"] < found["speedup_interval"]["high"]
    assert document["prefix_cache"]["hits"] == 0


@pytest.fixture
def runs(monkeypatch) -> list:
    """Of each measured run: whether draft tokens were enabled, and the proposer."""
    found: list = []
    inner = MeasuredEngine.generate

    def generate(self, *arguments):
        planner = planner_of(self.llm)
        found.append((planner.is_enabled, planner.proposer))
        return inner(self, *arguments)

    monkeypatch.setattr(MeasuredEngine, "generate", generate)
    return found


def test_throughput_with_and_without_drafts_alternates_over_rounds(drafting, runs):
    def run(rounds: int) -> dict:
        options = throughput.ThroughputOptions(
            drafting | {"speculative_model": "[suffix]"}, num_prompts=4, output_len=200, warmups=0, seed=0,
            compare_speculation=True, compare_rounds=rounds,
        )  # fmt: skip
        return throughput.run(options, recorder([])).document()

    document = run(3)
    assert [enabled for enabled, _ in runs] == [True, False, False, True, True, False]
    # Every round begins with a proposer that knows no outputs, and without cached prefixes.
    assert len({id(proposer) for _, proposer in runs}) == 6 and document["prefix_cache"]["hits"] == 0
    found = document["speculation"]
    assert len(found["speedups"]) == 3 and found["speedup"] == sorted(found["speedups"])[1]
    assert found["speedup_interval"]["low"] < found["speedup_interval"]["high"]
    assert document["total_output_tokens"] == 4 * 200 and document["completed"] == 4
    assert found["output_throughput_without"] > 0 and 0 < found["acceptance_by_position"][0] <= 1
    single = run(1)["speculation"]
    assert single["speedup_interval"] == {"low": None, "high": None} and len(single["speedups"]) == 1
    assert found["num_draft_tokens"] > single["num_draft_tokens"] > 0


def test_the_table_shows_acceptance_by_position_and_the_speedup(drafting, capsys):
    words = ["--input-len", "8", "--output-len", "200", "--dtype", "float32", "--speculative-model", "[ngram]"]
    assert main(["bench", "throughput", drafting["model"], *words, "--num-prompts", "2", "--compare-speculation"]) == 0
    err = capsys.readouterr().err
    assert "by position" in err and "3 rounds in turns" in err and "95 %" in err


def test_a_draft_model_computes_nothing_in_runs_without_drafts(drafting):
    """Not even the prompts."""
    arguments = {**drafting, "speculative_model": drafting["model"]}
    measured = MeasuredEngine(arguments)
    steps: list[int] = []
    runner = measured.llm.engine.executor.proposer.runner
    inner = runner.forward
    runner.forward = lambda step: (steps.append(planner_of(measured.llm).is_enabled), inner(step))[1]
    requests = [WorkloadRequest([5, 6, 7, 8] * 4, 20), WorkloadRequest([9, 8, 7] * 4, 20)]
    for number in range(2):
        measured.compare_drafts(requests, True, number)
    assert steps and all(steps)


def test_without_drafts_there_is_nothing_to_compare(engine, capsys):
    assert main(["bench", "latency", engine["model"], "--dtype", "float32", "--compare-speculation"]) == 2
    assert "--speculative-model" in capsys.readouterr().err
    document = latency.run(latency.LatencyOptions(engine, output_len=3, iterations=1), recorder([])).document()
    assert document["speculation"]["num_drafts"] == 0 and document["speculation"]["speedup"] is None


def test_a_gate_on_what_answers_of_one_token_lack_is_refused_before_the_model_loads(tmp_path, capsys):
    words = ["bench", "latency", str(tmp_path), "--output-len", "1", "--fail-if", "tpot_ms.p50>5"]
    assert main(words) == 2
    assert "answers have one token" in capsys.readouterr().err
