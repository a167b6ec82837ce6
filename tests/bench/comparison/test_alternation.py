"""``bench ab``: sides, alternation, stopping rules, and results with scripted sides."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from aiakq.arguments.comparison import AlternationArguments
from aiakq.bench.comparison import alternation, worker
from aiakq.bench.comparison.alternation import Alternation, run
from aiakq.bench.comparison.sides import Side, fresh_libraries, open_side
from aiakq.bench.comparison.worker import StepEnds
from aiakq.cli import main
from aiakq.errors import UNDECIDED, WORKER, AiakqError

ROOT = Path(__file__).resolve().parents[3]
#: A module ``aiakq`` whose LLM takes no time and reports what its argument ``speed`` says.
FAKE = """
import types

class SamplingParams:
    def __init__(self, **arguments):
        self.max_tokens = arguments["max_tokens"]

class LLM:
    def __init__(self, model, speed=1.0, token=1, problem=None, **arguments):
        if problem == "raise":
            raise ValueError("no such model.")
        self.speed, self.token, self.problem, self.turns = speed, token, problem, 0
        limits = types.SimpleNamespace(vocab_size=100)
        self.engine = types.SimpleNamespace(limits=limits, facts={"pages": arguments["num_gpu_blocks_override"]})

    def generate(self, prompts, params, use_tqdm):
        self.turns += 1
        if self.problem == "exit" and self.turns > 2:
            raise SystemExit("gone")
        print("noise on stdout")
        noise = 1 + 0.001 * (sum(prompts[0]["prompt_token_ids"]) % 7)
        first = 0.1 * noise
        last = first + 0.01 * self.speed * noise * (params.max_tokens - 1)
        times = types.SimpleNamespace(arrival_time=0.0, first_token_time=first, last_token_time=last)
        answer = types.SimpleNamespace(token_ids=[self.token] * params.max_tokens)
        return [types.SimpleNamespace(metrics=times, outputs=[answer]) for _ in prompts]
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with the module above, as --base and --new of a quick comparison."""
    monkeypatch.setattr(Side, "library", None)
    folder = tmp_path / "checkout"
    (folder / "aiakq").mkdir(parents=True)
    (folder / "aiakq" / "__init__.py").write_text(FAKE)
    (folder / "kernels").mkdir()
    return str(folder)


def compare(checkout: str, new: dict | None = None, base: dict | None = None, **settings):
    options = AlternationArguments(base=checkout, new=checkout, round_seconds=0.01, **settings)
    engines = {"base": base or {}, "new": new or {}}

    def opened(name, word, given, engine, stack, serve):
        side = open_side(name, word, given, engine, stack, serve)
        return Side(side.name, side.label, side.interpreter, side.path, {**side.engine, **engines[name]})

    reported: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alternation, "open_side", opened)
        record = run(options, {"model": "m"}, lambda *known: reported.append(known))
    return record.document(), reported


def rows_of(document: dict) -> dict[str, dict]:
    return {row["metric"]: row for row in document["metrics"]}


def test_five_percent_in_decode_are_found_at_the_first_analysis(checkout):
    document, reported = compare(checkout, {"speed": 1.05}, min_rounds=3, max_rounds=6)
    rows = rows_of(document)
    assert rows["decode_ms"]["ratio"] == pytest.approx(1.05, abs=1e-6) and rows["decode_ms"]["verdict"] == "worse"
    assert rows["prefill_ms"]["verdict"] == "equal" and document["verdict"] == "worse"
    assert document["rounds"] == 3 and reported[-1][0] == 3 and "decode_ms +5.0 %" in reported[-1][2]
    assert not rows["load_s"]["gated"]


def test_equal_sides_are_equal_and_have_equal_pages(checkout):
    document, _ = compare(checkout, min_rounds=3, max_rounds=6)
    assert document["verdict"] in ("equal", "not worse") and document["same_tokens"] and document["warnings"] == []
    assert {side["facts"]["pages"] for side in document["environment"]["sides"].values()} == {8 * 4 * 12 + 1}


def test_different_tokens_are_noticed(checkout):
    document, _ = compare(checkout, {"token": 2}, min_rounds=2, max_rounds=2)
    assert document["same_tokens"] is False and "different tokens" in document["warnings"][0]


@pytest.mark.parametrize(("problem", "reason"), [("raise", "no such model"), ("exit", "gone")])
def test_a_side_that_fails_is_named_with_its_reason(checkout, problem, reason):
    with pytest.raises(AiakqError) as caught:
        compare(checkout, {"problem": problem})
    assert caught.value.exit_code == WORKER
    assert str(caught.value).startswith("new: ") and reason in str(caught.value)


def state_of(ratios: list[float], **settings) -> Alternation:
    options = AlternationArguments(**{"min_rounds": 3, "max_rounds": 8, **settings})
    state = Alternation(options, (None, None), 0, ("decode_ms",))  # type: ignore[arg-type]
    state.rounds = [{"decode_ms": (10.0, 10.0 * ratio)} for ratio in ratios]
    return state


def test_it_continues_while_the_interval_contains_the_margin():
    state = state_of([1.0, 1.05, 0.97])
    state.analyze()
    assert not state.decided and state.verdicts() == {"decode_ms": "undecided"}


def test_an_undecided_metric_says_what_a_verdict_would_take():
    state = state_of([1.0, 1.05, 0.97])
    state.analyze()
    [warning] = state.noise_warnings()
    assert "The interval of decode_ms is" in warning and "margin of 2 %" in warning and "rounds" in warning
    state = state_of([1.0, 1.001, 1.0005])
    state.analyze()
    assert state.noise_warnings() == []


def test_it_stops_when_one_metric_is_worse_or_none_is_undecided():
    for ratios, verdict in (([1.05, 1.051, 1.0505], "worse"), ([1.0, 1.001, 1.0005], "equal")):
        state = state_of(ratios)
        state.analyze()
        assert state.decided and state.verdicts() == {"decode_ms": verdict}


def test_running_out_of_time_ends_with_an_analysis(checkout):
    document, _ = compare(checkout, {"speed": 1.05}, min_rounds=40, max_rounds=50, max_minutes=1e-4)
    assert document["rounds"] == 2 and rows_of(document)["decode_ms"]["low"] is not None


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"metrics": ("tpot",)}, "no metric 'tpot'"), ({"min_rounds": 9, "max_rounds": 8}, "--min-rounds 9")],
)
def test_settings_that_cannot_be_met_are_refused(checkout, settings, text):
    with pytest.raises(AiakqError, match=text):
        compare(checkout, **settings)


class Stepping:
    """An engine whose steps take some time, and during the second of which this thread waits (as it says)."""

    def __init__(self) -> None:
        self.count = 0

    def step(self, now: float) -> str:
        self.count += 1
        return f"step {self.count} at {now}"


def test_steps_last_from_the_end_of_one_to_the_end_of_the_next(monkeypatch):
    engine = Stepping()
    steps = StepEnds(engine)
    clock = iter([1.0, 3.0, 4.0, 6.5, 7.0])
    monkeypatch.setattr(worker.time, "monotonic", lambda: next(clock))
    assert [engine.step(now) for now in (0.0, 2.0)] == ["step 1 at 0.0", "step 2 at 2.0"]
    for _ in range(3):
        engine.step(4.0)
    assert steps.durations(2.5, 6.5) == [1.0, 2.5]  # of those that end in between
    assert steps.durations(2.5, 3.5) == [] == StepEnds(object()).durations(0.0, 9.0)
    steps.clear()
    assert steps.durations(0.0, 9.0) == []


class Disturbed:
    """An engine whose steps take 1 ms, times ``speed``; three of eight wait 40 ms for a processor."""

    def __init__(self, speed: float) -> None:
        self.speed, self.now, self.count, self.limits = speed, 0.0, 0, types.SimpleNamespace(vocab_size=100)

    def step(self) -> float:
        self.count += 1
        self.now += 0.001 * self.speed + (0.04 if self.count % 8 in (1, 4, 6) else 0.0)
        return self.now


@pytest.mark.parametrize("speed", [1.0, 1.05])
def test_steps_that_waited_for_a_processor_do_not_hide_how_long_the_others_take(monkeypatch, speed):
    engine = Disturbed(speed)
    monkeypatch.setattr(worker.time, "monotonic", lambda: engine.now)

    def generate(prompts, params, use_tqdm):
        arrival, ends = engine.now, [engine.step() for _ in range(33)]
        times = types.SimpleNamespace(arrival_time=arrival, first_token_time=ends[0], last_token_time=ends[-1])
        return [types.SimpleNamespace(metrics=times, outputs=[types.SimpleNamespace(token_ids=[1])])]

    llm = types.SimpleNamespace(engine=engine, generate=generate)
    steps = StepEnds(engine)
    measured = worker.measure(llm, {"input_len": 8, "output_len": 33, "batch_size": 1}, 0, steps)
    assert measured["decode_s"] == pytest.approx(0.001 * speed) and measured["decode_mean_s"] > 0.01
    assert measured["prefill_s"] == pytest.approx(0.04 + 0.001 * speed)


# --- sides -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:
        yield lambda word, settings=(), engine=None: open_side("new", word, settings, engine or {"model": "m"}, stack)


def version_of(side: Side) -> str:
    command = [side.interpreter, "-P", "-c", "import aiakq; print(aiakq.VERSION)"]
    return subprocess.run(command, env=side.environment(), capture_output=True, text=True, check=True).stdout.strip()


def fake_checkout(folder: Path, version: str) -> Path:
    (folder / "aiakq").mkdir(parents=True)
    (folder / "kernels").mkdir()
    (folder / "aiakq" / "__init__.py").write_text(f"VERSION = {version!r}\n")
    (folder / "kernels" / "__init__.py").write_text("")
    return folder


def test_this_installation_is_the_default(opened):
    side = opened(None)
    assert (side.interpreter, side.path) == (sys.executable, None) and "this installation" in side.label


def test_a_checkout_is_put_in_front(opened, tmp_path):
    assert version_of(opened(str(fake_checkout(tmp_path / "c", "checkout")))) == "checkout"


def test_a_wheel_is_unpacked(opened, tmp_path):
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("aiakq/__init__.py", "VERSION = 'wheel'\n")
    assert version_of(opened(str(tmp_path / "a-1-py3-none-any.whl"))) == "wheel"


def test_a_git_revision_is_extracted(opened, tmp_path, monkeypatch):
    folder = fake_checkout(tmp_path / "repo", "old")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    (folder / "aiakq" / "__init__.py").write_text("VERSION = 'new'\n")
    monkeypatch.chdir(folder)
    side = opened("HEAD")
    assert version_of(side) == "old" and "new: HEAD (" in side.label


def test_an_interpreter_or_an_environment_is_run(opened, tmp_path):
    (tmp_path / "env" / "bin").mkdir(parents=True)
    python = tmp_path / "env" / "bin" / "python"
    python.symlink_to(sys.executable)
    assert opened(str(python)).interpreter == opened(str(tmp_path / "env")).interpreter == str(python)


def test_a_model_and_settings_of_one_side(opened, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    side = opened(str(tmp_path), ["max-num-seqs=8", "kv_cache_dtype=int8"], {"model": "m", "dtype": "float32"})
    assert side.engine == {"model": str(tmp_path), "dtype": "float32", "max_num_seqs": 8, "kv_cache_dtype": "int8"}


@pytest.mark.parametrize(
    ("word", "settings", "text"),
    [
        ("no/such/thing", (), "is not a checkout, wheel"),
        (None, ("max_num_seqs",), "is not KEY=VALUE of an engine argument"),
        (None, ("sides=2",), "is not KEY=VALUE of an engine argument"),
        (None, ("max_num_seqs=many",), "max_num_seqs is 'many'"),
    ],
)
def test_words_that_name_no_side_are_refused(opened, word, settings, text):
    with pytest.raises(AiakqError, match=text):
        opened(word, settings)


def test_a_side_without_a_model_is_refused(opened):
    with pytest.raises(AiakqError, match="No model is given"):
        open_side("new", None, (), {"dtype": "float32"}, contextlib.ExitStack())


def test_equal_libraries_are_one_file_in_each_round(tmp_path, monkeypatch):
    monkeypatch.delenv("AIAKQ_CPU_LIBRARY", raising=False)
    files = []
    for number, content in enumerate((b"same", b"same", b"other")):
        files.append(tmp_path / f"library{number}")
        files[-1].write_bytes(content)
    sides = [Side("a", "a", sys.executable, None, {}) for _ in files]
    for side, file in zip(sides, files, strict=True):
        side.__dict__["library"] = file
    folder = tmp_path / "round"
    folder.mkdir()
    copies = fresh_libraries(sides, folder)
    assert copies[0] == copies[1] != copies[2] and {copy.parent for copy in copies} == {folder}
    assert sides[2].environment(copies[2])["AIAKQ_CPU_LIBRARY"] == str(copies[2])


# --- the command, with a real model -----------------------------------------------------------------------------------


def test_the_command_compares_settings_of_a_real_model(example_model, capsys, tmp_path):
    words = ["bench", "ab", str(example_model), "--dtype", "float32", "--new-set", "max_num_seqs=2"]
    words += ["--min-rounds", "2", "--max-rounds", "2", "--round-seconds", "0.1", "--output-len", "5"]
    report = tmp_path / "report.xml"
    assert main([*words, "--metric", "peak_mb", "--margin", "0.0001", "--junit", str(report)]) in (UNDECIDED, 10, 0)
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["kind"] == "ab" and document["rounds"] == 2 and document["same_tokens"]
    assert document["config"]["engines"]["new"]["max_num_seqs"] == 2
    assert "decode_ms" in err and report.read_text().count("<testcase") == 1
    assert (
        len(document["by_round"]["prefill_ms"]) == 2 and os.path.sep in document["environment"]["sides"]["new"]["aiakq"]
    )
