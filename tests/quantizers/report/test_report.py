"""The report as a page, the model card, and the command line they quote."""

import json
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from aiakq.evaluation.wording import DECIDES
from aiakq.quantizers import run_report
from aiakq.quantizers.model.experts import ExpertTokens
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.report import card as model_card
from aiakq.quantizers.report.page import html_page
from aiakq.quantizers.report.records import LayerResult, QuantizeReport, command_line
from aiakq.quantizers.run_report import PAGE_FILE, REPORT_FILE

EVIL = "<script>alert('\"&`')</script>"
#: Tags that HTML does not close.
VOID = {"meta", "link", "br", "img"}


def layers(blocks: int = 3) -> list[LayerResult]:
    return [
        LayerResult(f"model.layers.{block}.{name}", 0.01 * (block + 1), 64, 128, 4, 32, 0.5, 0.6, 90.0, 4.0)
        for block in range(blocks)
        for name in ("self_attn.q_proj", "mlp.down_proj")
    ]


def report(**changes: Any) -> QuantizeReport:
    made = QuantizeReport(
        input="org/model",
        output="out",
        method="awq",
        scheme="w4a16 g128 asym",
        format="awq",
        group_size=128,
        symmetric=False,
        dtype="bfloat16",
        tp=1,
        bits_per_weight=4.16,
        bytes_before=10**9,
        bytes_after=4 * 10**8,
        layers=layers(),
        version="1.0",
    )
    return replace(made, **changes)


class Reader(HTMLParser):
    """Checks that elements close in order, and collects what a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [f"{key}={value}" for key, value in attrs if key in ("src", "href") or key.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    return reader


def test_the_report_page_is_complete_and_self_contained() -> None:
    found = report(
        perplexity_before=10.0,
        perplexity_after=10.5,
        kl=0.0123,
        top1_agreement=0.95,
        evaluation_tokens=8176,
        seconds=75.0,
        peak_memory_bytes=3 * 10**9,
        verified=6,
        warnings=["Mind this."],
        notes=["Chose that."],
        calibration="a text",
        samples=3,
        calibration_lengths=(3, 5, 9),
        command="aiakq quantize -i a",
    )
    page = html_page(found)
    reader = read(page)
    assert not reader.fetched
    assert "script" not in reader.tags
    assert "url(" not in page and "@import" not in page
    assert page.count("<svg") == 3
    text = " ".join(" ".join(reader.text).split())
    for said in ("+5.00% from 10", "0.0123", "95.00%", "75 s", "3 GB peak memory", "Mind this.", "Chose that.",
                 "3 samples of 3 to 9 tokens (median 5)", "aiakq quantize -i a", "model.layers.2.mlp.down_proj",
                 "worst 3.00% in block 2"):  # fmt: skip
        assert said in text, said
    assert html_page(found) == page


def test_the_report_page_of_a_minimal_report() -> None:
    reader = read(html_page(report(layers=[])))
    assert "svg" not in reader.tags
    some = [LayerResult("model.layers.0.mlp.up_proj", None), LayerResult("lm_head", 0.0, weight_after=0.0)]
    assert read(html_page(report(layers=some))).tags.count("svg") == 2


def test_ranges_that_did_not_change_are_not_drawn() -> None:
    same = LayerResult("model.layers.0.a", 0.1, 1, 1, 4, 32, 2.0, 2.001, 1.0, 1.0)
    assert "before and after" not in html_page(report(layers=[same]))
    page = html_page(report(layers=[same, replace(same, name="model.layers.1.a", weight_after=1.5)]))
    assert "Weights, before and after" in page and "Inputs, before and after" not in page


def test_the_page_says_nothing_of_where_the_output_is() -> None:
    page = html_page(report(output="/home/someone/models/out", layers=[]))
    assert "aiakq serve out" in page and "someone" not in page


def test_text_on_the_report_page_is_escaped() -> None:
    found = report(
        input=EVIL,
        output=EVIL,
        scheme=EVIL,
        dtype=EVIL,
        version=EVIL,
        created=EVIL,
        command=EVIL,
        calibration=EVIL,
        calibration_sha256=EVIL,
        evaluation_text=EVIL,
        warnings=[EVIL],
        notes=[EVIL],
        layers=[LayerResult(f"model.layers.0.{EVIL}", 0.1, 1, 1, 4, 32, 1.0, 1.0, 1.0, 1.0, {EVIL: EVIL})],
        experts=[ExpertTokens(EVIL, [1, 2], 3, [0], [1])],
    )
    page = html_page(found)
    assert "<script" not in page
    assert read(page).tags.count("tr") >= 3


def test_experts_are_one_bar_up_to_their_worst_error() -> None:
    many = [
        LayerResult(f"model.layers.{block}.mlp.experts.{expert}.up_proj", 0.01 * (expert + 1), 8, 8, 4, 32, 1, 2, 3, 4)
        for block in range(2)
        for expert in range(64)
    ]
    page = html_page(report(layers=many, experts=[ExpertTokens("model.layers.0.mlp", list(range(64)), 8, [1], [0])]))
    reader = read(page)
    assert page.count("64 experts, ") == 2
    assert "details" in reader.tags  # more rows than are shown at once
    page = html_page(report(layers=[replace(layer, name=f"model.layers.{i}.a") for i in range(40) for layer in many]))
    assert "The 2,000 with the largest errors of 5,120" in page
    assert read(page).tags.count("tr") == 2001


def test_mean_and_worst_exclude_layers_without_a_measurement() -> None:
    found = report(layers=[LayerResult("a", 0.1), LayerResult("b", None), LayerResult("c", 0.3)])
    assert found.mean_error == pytest.approx(0.2)
    assert found.worst is not None and found.worst.name == "c"
    assert report(layers=[LayerResult("b", None)]).worst is None
    json.dumps(found.document(), allow_nan=False)


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_in_a_report_parses_to_the_same_options() -> None:
    """Every option's flag is one that ``aiakq quantize`` has."""
    import typer

    from aiakq.terminal.options import add_options
    from aiakq.terminal.quantize_command import quantize

    add_options(["quantize"])
    app = typer.Typer()
    app.command()(quantize)
    command = typer.main.get_command(app)
    flags = {flag: item.name for item in command.params for flag in (*item.opts, *item.secondary_opts)}
    for item in fields(QuantizeOptions):
        options = QuantizeOptions("a", "b", "gptq")
        default = item.default
        value: Any = {bool: not default, tuple: ("x", "y")}.get(type(default), "7")
        object.__setattr__(options, item.name, False if item.name == "symmetric" else value)
        words = shlex.split(command_line(options))
        assert words[:2] == ["aiakq", "quantize"]
        named = [flags[word] for word in words if word.startswith("-")]
        assert set(named) == {"input", "output", "method", item.name}, item.name


def test_the_command_in_a_report_is_shell_quoted() -> None:
    options = QuantizeOptions("my model", "out", "gptq", bits=3, symmetric=False, evaluate=False, skip=("*.0.*", "y z"))
    assert command_line(options) == (
        "aiakq quantize -i 'my model' -o out -quant_type gptq --bits 3 --asymmetric --no-eval "
        "--skip '*.0.*' --skip 'y z'"
    )
    assert "-o DIR" in command_line(options, output="DIR")


# --- the model card ---------------------------------------------------------------------------------------------------


def front(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def card_of(source: Path, **changes: Any) -> str:
    options = QuantizeOptions(str(source), "/somewhere/out", "awq", overwrite=True)
    return model_card.text(report(**changes), options, source, model_card.inherited_entries(source))


def test_a_card_inherits_the_license(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en, fr]\ntags: [x]\n---\n# Model\n")
    card = card_of(source)
    assert front(card) == {
        "license": "apache-2.0",
        "language": ["en", "fr"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantized", "awq", "4-bit", "aiakq"],
    }
    assert str(tmp_path) not in card and "somewhere" not in card and "--overwrite" not in card
    assert "aiakq quantize -i model -o DIR -quant_type awq" in card


@pytest.mark.parametrize(
    "readme",
    [
        b"",
        b"# no front matter",
        b"---\n- a list\n---\n",
        b"---\nlicense: [\n---\n",
        b"\xff\xfe",
        b"---\nlicense: {a: 1}\n---\n",
    ],
)
def test_a_card_survives_any_card(tmp_path: Path, readme: bytes) -> None:
    (tmp_path / "README.md").write_bytes(readme)
    assert "license" not in front(card_of(tmp_path))


def test_a_card_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("chats.jsonl", "book.txt"):
        (tmp_path / name).write_text("x")
    given = f"{tmp_path}/chats.jsonl,{tmp_path}/rows:train,org/data:train"
    options = QuantizeOptions(str(tmp_path), "out", "gptq", calibration=given, eval_text=tmp_path / "book.txt")
    card = model_card.text(report(), options, tmp_path)
    assert "--calibration chats.jsonl,rows:train,org/data:train --eval-text book.txt" in " ".join(card.split())
    assert str(tmp_path.parent) not in card


def test_a_card_names_the_model_on_the_hub(tmp_path: Path) -> None:
    options = QuantizeOptions("org/model-1.5B", "out", "gptq")
    card = model_card.text(report(method="gptq", format="gptq_v2", tp=4), options, tmp_path)
    assert front(card)["base_model"] == "org/model-1.5B"
    assert front(card)["base_model_relation"] == "quantized"
    assert "vLLM does not read this format" in card
    card = model_card.text(report(tp=4), options, tmp_path)
    assert "--tensor-parallel-size 4" in card


# --- the whole way ----------------------------------------------------------------------------------------------------


def test_an_output_has_both_reports_and_a_model_card(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """What the layers' ranges were is measured: a method that folds nothing leaves inputs as they are."""
    source = tiny_model("LlamaForCausalLM")
    for method in ("smooth_quant", "weight_only_int8"):
        options = QuantizeOptions(
            str(source), str(tmp_path / method), method, samples=4, seqlen=32, evaluate=False, device="cpu"
        )
        found = quantize_checkpoint(options)
        document = json.loads((tmp_path / method / REPORT_FILE).read_text())
        assert document["samples"] == 4 and document["calibration_lengths"] == [32, 32, 32]
        assert document["command"] == command_line(options)
        read((tmp_path / method / PAGE_FILE).read_text())
        assert front((tmp_path / method / "README.md").read_text())["tags"][1] == method
        assert len(found.layers) == 14
        for layer in found.layers:
            assert layer.weight_before and layer.weight_after and layer.input_before and layer.input_after
            if method == "weight_only_int8":
                assert layer.weight_after == pytest.approx(layer.weight_before, rel=0.01)
                assert layer.input_after == layer.input_before
        moved = [
            layer.name for layer in found.layers if layer.input_after != pytest.approx(layer.input_before, rel=0.05)
        ]
        assert len(moved) > 8 if method == "smooth_quant" else not moved


def test_a_card_of_blank_lines_takes_no_time(tmp_path):
    (tmp_path / "README.md").write_text("---" + "\n" * (1 << 20))
    started = time.process_time()
    assert model_card.inherited_entries(tmp_path) == {}
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("card", "entries"),
    [
        ("---\nlicense: mit\n---\ntext", {"license": "mit"}),
        ("\ufeff--- \r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        ("---\nlicense: &a mit\nlanguage: *a\n---\n", {}),
        ("---\nlicense: mit\n" + "x" * (1 << 16) + "\n---\n", {}),
        ("---\nlicense: [\n---\n", {}),
        ("---\nlicense: mit\n", {}),
        ("license: mit\n---\n", {}),
        ("", {}),
    ],
)
def test_the_front_matter_of_a_card_is_read_in_one_pass(tmp_path, card, entries):
    (tmp_path / "README.md").write_text(card)
    assert model_card.inherited_entries(tmp_path) == entries


def test_a_page_that_cannot_be_made_does_not_prevent_publication(monkeypatch):
    written = {}
    writer = SimpleNamespace(add_text=written.__setitem__, add_json=written.__setitem__)
    prepared = SimpleNamespace(options=None, source=None)
    result = report()
    monkeypatch.setattr(run_report, "html_page", lambda report: "page")
    run_report.write_report(writer, result, prepared, {})  # the card fails: there are no options
    assert set(written) == {run_report.PAGE_FILE, run_report.REPORT_FILE}
    assert "README.md was not written" in str(written[run_report.REPORT_FILE]["warnings"])


def test_figures_of_texts_are_on_the_page_and_the_card_with_the_number_that_decides() -> None:
    worst = {"kl": None, "context": "\x1b[31m\n" + EVIL, "token": "\u202e", "p": 0.1, "p_original": 0.2}
    worst |= {key: [{"token": EVIL, "id": 1, "p": 0.5}] for key in ("choices", "original_choices")}
    remark = "On code the perplexity is below the original's (-1.00 %). This is not fidelity, and may be chance."
    interval = {"low": 0.012, "high": 0.0134}
    text = {"name": "code", "text": "the bundled code", "kl": 0.0123, "kl_interval": interval, "tokens": 64}
    text |= {"perplexity_ratio": 0.99, "worst_tokens": [worst], "remark": remark}
    found = report(kl=0.0123, evaluation_text="the bundled code", evaluations=[text], notes=[remark, "Chose that."])
    page = html_page(found)
    said = " ".join(" ".join(read(page).text).split())
    assert DECIDES in said and "0.0120 to 0.0134" in said and said.count("This is not fidelity") == 1
    assert "script" not in read(page).tags and "\x1b" not in page and "\u202e" not in page
    assert r"'\x1b[31m\n<script>" in said and r"'\u202e' (20.0%, 10.0%)" in said and "infinite" in said
    options = QuantizeOptions("org/model", "out", "awq")
    card = model_card.text(found, options, Path("source"))
    assert DECIDES in card and "0.0120 to 0.0134" in card and card.count("This is not fidelity") == 1


def test_models_whose_linears_transformers_does_not_replace_are_not_loaded_there(tiny_model, tmp_path):
    """Falcon has a class of its own for them."""
    for architecture, is_own in (("FalconForCausalLM", True), ("LlamaForCausalLM", False)):
        folder = tmp_path / architecture
        options = QuantizeOptions(str(tiny_model(architecture)), str(folder), "weight_only_int8", evaluate=False)
        report = quantize_checkpoint(options)
        assert (
            any("a class of its own" in line for line in report.warnings) == is_own == bool(report.not_in_transformers)
        )
        assert ("from_pretrained" not in (folder / "README.md").read_text()) == is_own


def test_awq_files_in_which_transformers_expects_factors_of_activations_are_not_loaded_there(tiny_model, tmp_path):
    """It fills them with what is in memory, and the model computes NaN."""
    for architecture, expects in (("Starcoder2ForCausalLM", True), ("LlamaForCausalLM", False)):
        folder = tmp_path / architecture
        quick = {"evaluate": False, "samples": 4, "seqlen": 32, "group_size": 32}
        report = quantize_checkpoint(QuantizeOptions(str(tiny_model(architecture)), str(folder), "awq", **quick))
        assert ("factors that AutoAWQ writes" in report.not_in_transformers) == expects
        card = (folder / "README.md").read_text()
        assert ("from_pretrained" not in card) == expects and "vllm serve" in card
