"""``--config FILE``: options of a file come after those of the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import aiakq


@pytest.fixture
def serve(process, tmp_path):
    """Run ``aiakq serve`` with a config file of this text and further words; it never gets as far as serving."""

    def run(text: str, *words: str):
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return process("serve", "--config", str(path), *words)

    return run


def test_the_command_line_comes_before_the_file_and_the_file_before_defaults(serve):
    done = serve("model: ./not-here\nmax-num-seqs: 0\n")
    assert done.code == 2 and "serve.yaml is 0" in done.err and "--max-num-seqs in" in done.err
    done = serve("model: ./not-here\nmax-num-seqs: 0\n", "--max-num-seqs", "3")
    assert "error[model_missing]" in done.err and "not-here" in done.err
    assert "other-place" in serve("model: ./not-here\n", "./other-place").err
    assert "other-place" in serve("model: ./not-here\n", "--model", "./other-place").err


def test_values_have_their_types(serve):
    done = serve(
        "model: ./not-here\nmax_model_len: 25.6k\nserved-model-name: [a, b]\nenforce-eager: true\n"
        "hf-overrides: {rope_theta: 5.0}\ngpu-memory-utilization: 0.5\n"
    )
    assert "error[model_missing]" in done.err
    assert "serve.yaml is 'http'" in serve("model: m\nport: http\n").err
    assert "serve.yaml is 1" in serve("model: m\nenforce-eager: 1\n").err


def test_a_file_takes_the_spellings_of_the_command_line(serve):
    text = "model: ./not-here\n-tp: 1\nmax-model_len: '64'\nenforce-eager: 'False'\nhf-overrides.rope_theta: 5.0\n"
    assert "error[model_missing]" in serve(text + "hf-overrides: {a: 1}\n").err
    assert "it sets tensor_parallel_size twice" in serve("model: m\ntp: 1\ntensor-parallel-size: 2\n").err
    assert "it sets hf_overrides.a twice" in serve("hf-overrides.a: 1\nhf_overrides.a: 2\n").err


def test_unsupported_options_get_a_line_or_are_refused(serve):
    done = serve("model: ./not-here\nswap-space: 9\ntask: generate\n")
    assert "--swap-space does nothing here" in done.err and "error[model_missing]" in done.err
    assert "--enable-sleep-mode is not available" in serve("model: m\nenable-sleep-mode: true\n").err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a\n- b\n", "not a mapping of option names"),
        ("port: [1\n", "not valid YAML"),
        ("port: 1\n--port: 2\n", "twice"),
        ("prt: 1\n", "no engine argument 'prt'"),
        ("a: &x [1]\nb: *x\n", "line 2 has an alias"),
        ("a: !!python/object/apply:os.system [exit]\n", "not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_read_as_options_is_refused(serve, text, reason):
    done = serve(text)
    assert done.code == 2 and reason in done.err and len(done.err.strip().splitlines()) == 1


def test_a_missing_file_is_refused(process):
    done = process("bench", "latency", "m", "--config", "./nothing.yaml")
    assert done.code == 2 and "--config is 'nothing.yaml'" in done.err


def test_values_are_parsed_the_same_on_the_command_line(process):
    for words in (["-1"], ["auto"], ["25.6k"], ["32K"]):
        done = process(
            "serve", "./not-here", "--port", "0", "--max-model-len", *words, "--hf-overrides", '{"rope_theta": 5}'
        )
        assert "error[model_missing]" in done.err
    assert "--max-model-len is '1.5K'" in process("bench", "latency", "m", "--max-model-len", "1.5K").err
    assert "a JSON object" in process("serve", "m", "--hf-overrides", "rope_theta").err


def test_python_dash_m_aiakq_runs_the_command_line():
    done = subprocess.run([sys.executable, "-P", "-m", "aiakq", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"aiakq {aiakq.__version__}")
