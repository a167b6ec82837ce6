"""quantize, eval, inspect and serve on the example model, one after the other as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import httpx
import pytest

from aiakq.evaluation.wording import DECIDES


@pytest.fixture(scope="module")
def quantized(program, example_model, tmp_path_factory):
    """The example model with 8-bit weights, made by the command; (folder, what the command printed)."""
    folder = tmp_path_factory.mktemp("quantized") / "w8"
    words = ["quantize", "-i", example_model, "-o", folder, "-quant_type", "weight_only_int8", "-tp", "1", "-t", "bf16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(program), *map(str, words), "--samples", "4", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_quantize_reports_what_it_made(quantized):
    folder, done = quantized
    document = json.loads(done.stdout)
    assert (document["kind"], document["method"], document["output"]) == ("quantize", "weight_only_int8", str(folder))
    assert document["bytes_after"] < 0.7 * document["bytes_before"]
    assert document["perplexity_after"] == pytest.approx(document["perplexity_before"], rel=0.005)
    for text in (
        "bits per weight",
        "layer error",
        "worst layer",
        "perplexity",
        "quantize 6/6",
        f"aiakq serve {folder}",
    ):
        assert text in done.stderr
    names = [line[:16].strip() for line in done.stderr.splitlines()]
    at = names.index("quality")
    assert names[at + 1 : at + 4] == ["KL divergence", "top-1 agreement", "perplexity"]
    assert DECIDES in " ".join(done.stderr.split())
    assert document["evaluations"][0]["kl"] == document["kl"]
    # What libraries have to say is not for the user of a command that works.
    lines = done.stderr.splitlines()
    assert all(line.startswith("quantize: ") for line in lines[: lines.index("quantized")])


def test_an_output_that_exists_is_refused_in_one_line(aiakq, quantized, example_model):
    folder, _ = quantized
    ended = aiakq("quantize", "-i", example_model, "-o", folder, "-quant_type", "awq")
    assert ended.code == 6 and "error[output_exists]" in ended.last


def test_inspect_of_a_quantized_model(aiakq, quantized):
    folder, _ = quantized
    ended = aiakq("inspect", folder, "--json")
    document = json.loads(ended.out)
    assert document["writer"].startswith("aiakq ")
    assert document["quantization"]["method"] == "weight_only_int8"
    assert document["bits_per_quantized_weight"] == pytest.approx(8.05, abs=0.03)
    linears = [layer for layer in document["layers"] if layer["scheme"] == "w8a16"]
    assert len(linears) == 42 and all(layer["implementation"] for layer in linears)
    assert "w8a16" in ended.err and " row " in ended.err


def test_eval_agrees_with_the_report_of_quantize(aiakq, quantized, example_model):
    folder, done = quantized
    report = json.loads(done.stdout)
    ended = aiakq("eval", folder, "--original", example_model, "--json", "--fail-if", "kl>0.01,top1_agreement<0.9")
    assert ended.code == 0
    document = json.loads(ended.out)
    assert document["perplexity"] == pytest.approx(report["perplexity_after"])
    assert document["perplexity_original"] == pytest.approx(report["perplexity_before"])
    assert document["tokens"] == report["evaluation_tokens"]
    assert 0 < document["kl"] < 0.01 and 0.9 < document["top1_agreement"] <= 1
    assert "perplexity" in ended.err and "top-1 agreement" in ended.err
    assert [text["name"] for text in document["texts"]] == ["prose", "dialogue", "code"]
    assert document["kl"] == document["texts"][0]["kl"] != document["texts"][1]["kl"], "texts are not averaged"
    assert document["kl_interval"]["low"] < document["kl"] < document["kl_interval"]["high"]
    assert DECIDES in " ".join(ended.err.split()) and DECIDES in document["remarks"]
    assert "tokens that changed most: code" in ended.err
    parts = [(gate["gate"], gate["part"]) for gate in document["gates"]]
    assert parts[:3] == [("kl>0.01", "prose"), ("kl>0.01", "dialogue"), ("kl>0.01", "code")]


def test_eval_gates_fail_on_the_text_that_fails(aiakq, quantized, example_model):
    folder, _ = quantized
    words = ("eval", folder, "--original", example_model, "--text", "dialogue", "--text", "code", "--limit", "1024")
    document = json.loads(aiakq(*words, "--json").out)
    small, large = sorted(document["texts"], key=lambda text: text["kl"])
    limit = (small["kl"] + large["kl"]) / 2
    ended = aiakq(*words, "--json", "--fail-if", f"kl>{limit}")
    assert ended.code == 10 and f" on {large['name']} (measured" in ended.last
    assert [gate["failed"] for gate in json.loads(ended.out)["gates"] if gate["part"] == small["name"]] == [False]


def test_eval_compares_two_quantized_models(aiakq, quantized, example_model, tmp_path):
    folder, _ = quantized
    words = ("-quant_type", "gptq", "--bits", "2", "--samples", "4", "--seqlen", "64", "--no-eval")
    assert aiakq("quantize", "-i", example_model, "-o", tmp_path / "worse", *words).code == 0
    words = ("eval", tmp_path / "worse", folder, "--against", example_model, "--text", "code", "--limit", "2048")
    ended = aiakq(*words, "--json", "--fail-if", "worse_than>0")
    assert ended.code == 10 and "worse_than>0 (measured 1)" in ended.last
    document = json.loads(ended.out)
    (compared,) = document["comparisons"]
    assert compared["verdict"] == "worse" == compared["texts"][0]["verdict"]
    assert compared["texts"][0]["kl_ratio_interval"]["low"] > 1
    assert document["versus"][0]["kl"] == compared["texts"][0]["kl_versus"] < document["kl"]
    assert f"{tmp_path / 'worse'} against {folder}, paired" in ended.err


def test_eval_options(aiakq, quantized, tmp_path, heldout_text):
    folder, _ = quantized
    text = tmp_path / "text.txt"
    text.write_text(heldout_text[:4000], encoding="utf-8")
    words = ("eval", folder, "--text", text, "--seqlen", "64", "--limit", "256")
    ended = aiakq(*words, "--json", "--output", tmp_path / "result.json", "--fail-if", "perplexity>1")
    assert ended.code == 10 and "error[gate_failed]" in ended.last
    document = json.loads(ended.out)
    assert document == json.loads((tmp_path / "result.json").read_text())
    assert (document["config"]["windows"], document["config"]["seqlen"], document["tokens"]) == (4, 64, 4 * 63)
    assert document["kl"] is None
    plain = aiakq(*words)
    assert "perplexity" in plain.out and "perplexity" not in plain.err  # the table can be piped


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--seqlen", "4096"], 2, "at most 1024"),
        (
            ["--text", "nowhere.txt"],
            3,
            "nowhere.txt is neither a file nor one of the bundled texts (prose, dialogue, code)",
        ),
        (["--text", "code", "--text", "code"], 2, "code cannot be combined with code: a text is measured once"),
        (["other"], 2, "no --original"),
        (["--task-limit", "3"], 2, "no --tasks"),
        (["--fail-if", "worse_than>0"], 2, "name them after MODEL"),
        (["--dtype", "int3"], 2, "--dtype"),
        (["--original", "no/such/model"], 3, "error[model_missing]"),
        (["--fail-if", "kll>1"], 2, "similar keys: kl"),
        (["--fail-if", "kl>0.1"], 2, "does not measure kl: it compares with the original model; add --original MODEL"),
    ],
)
def test_eval_refusals(aiakq, example_model, words, code, text):
    ended = aiakq("eval", example_model, *words)
    assert ended.code == code and text in ended.last


def test_eval_of_models_with_different_vocabularies(aiakq, example_model, tiny_model):
    ended = aiakq("eval", example_model, "--original", tiny_model("LlamaForCausalLM"), "--limit", "64")
    assert ended.code == 2 and "error[option_conflict]" in ended.last and "predict 320 and 4096 tokens" in ended.last


def test_serve_shows_one_table_and_a_curl_that_works(program, example_model):
    words = [program, "serve", example_model, "--port", "0", "--num-gpu-blocks-override", "65"]
    words += ["--served-model-name", "tiny,books"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, text=True, env=environment)
    try:
        shown = []
        for line in running.stderr:
            shown.append(line.rstrip("\n"))
            if line.startswith("curl "):
                break
        table = "\n".join(shown)
        for text in ("start-up", "weights", "KV pages", "all", "dtype", "linear layers", "ready at http://127.0.0.1:"):
            assert text in table
        url = next(line for line in shown if line.startswith("ready at ")).removeprefix("ready at ")
        assert f"playground {url}/" in shown
        names = [model["id"] for model in httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]]
        assert names == ["tiny", "books"]
        answer = subprocess.run(
            ["bash", "-c", shown[-1].replace("curl ", "curl -sS --noproxy '*' ", 1)], capture_output=True, text=True
        )
        assert json.loads(answer.stdout)["choices"][0]["text"]
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        assert "Stopped." in running.stderr.read()
    finally:
        running.kill()
        running.stderr.close()


def test_serve_of_a_missing_model_is_one_line(process, tmp_path):
    ended = process("serve", tmp_path / "none", "--port", "0")
    assert ended.code == 3 and ended.err.count("\n") == 1 and "error[model_missing]" in ended.err
