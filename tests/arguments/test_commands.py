"""Every option of every command: flag, environment variable and configuration key give the same value and error."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from aiakq import cli
from aiakq.arguments.argument import Argument
from aiakq.arguments.commands import COMMANDS, CONFIG, given_values
from aiakq.arguments.environment import SETTINGS, known_variables, unknown_variables
from aiakq.arguments.server import checked
from aiakq.errors import AiakqError
from aiakq.quantizers.options import QuantizeOptions
from aiakq.terminal.options import add_options

ROWS = [(name, row) for name, command in COMMANDS.items() for row in command.rows]
IDS = [f"{name} {row.key}" for name, row in ROWS]
#: Names that no option may take over: settings, a macro of the native library, and variables of these tests. The API
#: key is a setting of ``serve`` and an option of ``bench serve``.
RESERVED = (SETTINGS.keys() - {"AIAKQ_API_KEY"}) | {
    "AIAKQ_ABI",
    "AIAKQ_FRAMEWORKS",
    "AIAKQ_CONTAINER",
    "AIAKQ_IMAGE_ENGINE",
    "AIAKQ_INTEROP",
    "AIAKQ_KILLS",
    "AIAKQ_RANKS",
    "AIAKQ_SOAK_SECONDS",
}
#: Values of rows that take only some strings.
TEXTS = {
    "params": "temperature=0;top_p=1",
    "collect_detailed_traces": "model,worker",
    "playground_servers": "http://127.0.0.1:8001,/other",
    "lora_modules": "sql=/adapters/sql;chat=/adapters/chat",
    "pp_layer_partition": "3,1",
    "goodput": "ttft:200,tpot:50",
    "shapes": "64x32,128x64",
    "rows": "4,8",
    "tune": "48steps",
}


def text_of(row: Argument) -> str:
    """A value other than the default, as a user writes it."""
    if row.name in TEXTS and row.type is not bool:
        return TEXTS[row.name]
    if row.choices:
        return str(next((choice for choice in row.choices if choice != row.default), row.default))
    if row.type in (list, tuple):
        return row.separator.join(["one", "two"])
    if row.type is bool:
        return "false" if row.default else "true"
    if row.type is dict:
        return '{"factor": 2}'
    if row.type in (int, float):
        kind = row.type
        low = row.low if row.low is not None else row.above
        high = row.high if row.high is not None else (low or 0) + 10
        value = kind(((low or 0) + high) / 2)
        return str(value if value != row.default else kind(high))
    return "text"


def config_value_of(row: Argument, text: str) -> Any:
    """The same in YAML: a list of its own, other values as they are."""
    if row.type in (list, tuple):
        return text.split(row.separator)
    return yaml.safe_load(text) if row.type in (bool, int, float, dict) else text


def words_of(row: Argument, text: str) -> Any:
    """The same as the parser of the command line passes it on."""
    if row.type is bool:
        return text == "true"
    return [text] if row.type in (list, tuple) else text


@pytest.fixture(scope="module")
def options_of_commands() -> dict[str, dict[str, Any]]:
    """The parameters of every command as the program builds them, by command and flag (or name of a word)."""
    add_options(word for name in COMMANDS for word in name.split())
    program: Any = typer.main.get_command(cli.app)
    found = {}
    for name in COMMANDS:
        command = program
        for word in name.split():
            command = command.commands[word]
        found[name] = {opt: p for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    return found


@pytest.mark.parametrize(("command", "row"), ROWS, ids=IDS)
def test_a_row_gives_the_same_value_from_every_source(command, row, options_of_commands):
    text = text_of(row)
    flags = [row.name] if row.positional else [*row.all_flags, *([row.off_flag] if row.type is bool else [])]
    for flag in flags:
        parameter = options_of_commands[command][flag]
        assert parameter.name == row.name
        assert parameter.default is None, "only what the user wrote is passed on"
    from_words = given_values((row,), {row.name: words_of(row, text)}, {}, {})
    assert set(from_words) == {row.name}
    assert from_words[row.name] != row.default or row.low == row.high
    assert given_values((row,), {}, {}, {row.key: config_value_of(row, text)}) == from_words
    if row.environment:
        assert row.variable == "AIAKQ_" + row.key.upper()
        assert given_values((row,), {}, {row.variable: text}, {}) == from_words
    if row in COMMANDS["serve"].engine:
        value = config_value_of(row, text)
        assert getattr(checked({row.name: value}, server=True), row.name) == from_words[row.name]


def wrong_text_of(row: Argument) -> str | None:
    """A value that the row refuses; None if it takes any string."""
    if row.convert is not None:
        return "0x"
    if row.choices or row.type in (int, float, bool, dict):
        return "[wrong"
    return None


@pytest.mark.parametrize(("command", "row"), ROWS, ids=IDS)
def test_a_wrong_value_gets_the_same_error_from_every_source(command, row):
    text = wrong_text_of(row)
    if text is None:
        return
    messages = []
    sources: list[tuple[str, dict, dict, dict]] = [(row.flag, {}, {}, {row.key: text})]
    if row.type is not bool:  # a switch on the command line has no value
        sources.append((row.flag, {row.name: words_of(row, text)}, {}, {}))
    if row.environment:
        sources.append((str(row.variable), {}, {str(row.variable): text}, {}))
    for name, words, environment, config in sources:
        with pytest.raises(AiakqError) as caught:
            given_values((row,), words, environment, config)
        assert caught.value.id == "bad_option" and "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"{name} is ")
        messages.append(str(caught.value).removeprefix(name))
    assert len(set(messages)) == 1


@pytest.mark.parametrize(("command", "row"), ROWS, ids=IDS)
def test_numbers_outside_their_bounds_are_refused(command, row):
    beyond = [] if row.low is None else [row.low - 1]
    beyond += [] if row.high is None or row.high > 2**62 else [row.high + 1]
    beyond += [] if row.above is None else [row.above]
    for value in beyond:
        if row.automatic and value == -1:
            continue
        with pytest.raises(AiakqError, match="which is not"):
            given_values((row,), {row.name: str(row.type(value))}, {}, {})


@pytest.mark.parametrize("command", COMMANDS)
def test_names_and_variables_of_a_command_are_unique_and_free(command):
    rows = (*COMMANDS[command].rows, CONFIG)
    for names in ([row.name for row in rows], [row.key for row in rows], [row.variable for row in rows]):
        present = [name for name in names if name is not None]
        assert len(present) == len(set(present))
        assert not RESERVED & set(present)


def test_every_variable_that_the_program_reads_is_reserved_or_of_a_row():
    root = Path(cli.__file__).parents[1]
    sources = [*root.glob("aiakq/**/*.py"), *root.glob("kernels/**/*.py")]
    known = RESERVED | known_variables()
    found = {name for path in sources for name in re.findall(r"AIAKQ_[A-Z][A-Z_]+", path.read_text(encoding="utf-8"))}
    assert found <= known


def test_the_command_line_comes_before_the_environment_before_the_file():
    command = COMMANDS["bench kernels"]
    words: dict[str, Any] = {"context": "10"}
    environment = {"AIAKQ_CONTEXT": "20", "AIAKQ_GROUP_SIZE": "21", "AIAKQ_DTYPE": ""}
    config = {"context": 30, "group_size": 31, "dtype": "float32"}
    arguments, _ = command.values(words, environment, config)
    assert (arguments.context, arguments.group_size, arguments.dtype) == (10, 21, "float32")
    assert arguments.kv_cache_dtype == "auto"


def test_a_value_is_only_checked_where_it_counts():
    row = next(row for name, row in ROWS if name == "serve" and row.name == "port")
    assert given_values((row,), {"port": "1"}, {"AIAKQ_PORT": "tcp://10.0.0.1:80"}, {"port": "x"}) == {"port": 1}
    with pytest.raises(AiakqError, match="AIAKQ_PORT is 'tcp://10.0.0.1:80', which is not an integer"):
        given_values((row,), {}, {"AIAKQ_PORT": "tcp://10.0.0.1:80"}, {})


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("TRUE", True), ("1", True), ("false", False), ("0", False)]
)
def test_switches_in_the_environment(text, value):
    row = next(row for name, row in ROWS if name == "serve" and row.name == "enforce_eager")
    assert given_values((row,), {}, {"AIAKQ_ENFORCE_EAGER": text}, {}) == {"enforce_eager": value}


def test_a_misspelled_variable_is_reported_with_the_closest_name(process, tmp_path):
    words = ("quantize", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"), "-quant_type", "awq")
    done = process(*words, AIAKQ_MAX_NUM_SEQ="4", AIAKQ_SEQLEN="128")
    assert done.err.count("AIAKQ_MAX_NUM_SEQ. Did you mean AIAKQ_MAX_NUM_SEQS?") == done.err.count("AIAKQ_") - 1 == 1
    assert "error[model_missing]" in done.err


def test_known_variables_and_those_of_kubernetes_are_not_reported():
    kubernetes = ["AIAKQ_SERVICE_HOST", "AIAKQ_SERVICE_PORT_HTTP", "AIAKQ_PORT", "AIAKQ_PORT_8000_TCP_ADDR"]
    kubernetes += ["AIAKQ_GATEWAY_SERVICE_PORT", "AIAKQ_GATEWAY_PORT"]
    assert unknown_variables(["PATH", *kubernetes, *known_variables()]) == []
    assert unknown_variables(["AIAKQ_XYZZY"]) == [
        "No option or setting reads the environment variable AIAKQ_XYZZY. "
        "Variables are named after the options that --help lists."
    ]


def test_the_api_keys_of_the_server_are_read_with_its_options():
    """Those of the variable are added to those of --api-key, see tests/server/http/test_auth.py."""
    command = COMMANDS["serve"]
    assert command.values({}, {"AIAKQ_API_KEY": "secret"}, {}) == [{}]
    (arguments, *_) = COMMANDS["bench serve"].values({}, {"AIAKQ_API_KEY": "secret"}, {})
    assert arguments.api_key == "secret"


def test_variables_of_the_engine_do_not_count_for_a_server_that_runs_already():
    command = COMMANDS["bench serve"]
    environment = {"AIAKQ_DTYPE": "float32", "AIAKQ_NUM_PROMPTS": "7"}
    arguments, *_, engine = command.values({}, environment, {})
    assert arguments.num_prompts == 7 and engine == {}
    assert command.values({}, environment, {}, "folder")[-1] == {"dtype": "float32", "model": "folder"}


def test_the_fields_of_quantize_options_are_the_rows():
    rows = {row.name for row in COMMANDS["quantize"].rows} - {"json", "dry_run"}
    assert {field.name for field in dataclasses.fields(QuantizeOptions)} == rows


def test_options_from_the_environment_and_a_file_reach_the_command(process, tmp_path):
    path = tmp_path / "quantize.yaml"
    path.write_text(f"output: {tmp_path / 'out'}\nquant-type: awq\nsymmetric: true\n")
    missing = str(tmp_path / "none")
    done = process("quantize", AIAKQ_CONFIG=str(path), AIAKQ_INPUT=missing)
    assert done.code == 3 and "error[model_missing]" in done.err and missing in done.err
    done = process("quantize", "--config", str(path), AIAKQ_INPUT=missing, AIAKQ_SAMPLES="many")
    assert done.code == 2 and "AIAKQ_SAMPLES is 'many', which is not an integer." in done.err
    done = process("quantize", "--config", str(path))
    assert "-i or --input is missing." in done.err
    assert "There is no option 'outptu'" in process("quantize", *config_with(tmp_path, "outptu: x\n")).err


def config_with(folder: Path, text: str) -> tuple[str, str]:
    path = folder / "other.yaml"
    path.write_text(text)
    return "--config", str(path)


def test_the_tables_load_nothing_heavy():
    code = "import sys, aiakq.arguments.commands; print(sorted({'torch', 'typer', 'yaml', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "[]", done.stderr


def test_choices_are_taken_in_any_case():
    row = next(row for name, row in ROWS if name == "quantize" and row.name == "dtype")
    assert given_values((row,), {"dtype": "BF16"}, {}, {}) == {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("load_format", "tensorizer"), ("load_format", "sharded_state"), ("tokenizer_mode", "custom")],
)
@pytest.mark.parametrize("place", ["words", "environment", "file"])
def test_values_of_vllm_that_are_replaced_say_by_what(name, value, place):
    row = next(row for command, row in ROWS if command == "serve" and row.name == name)
    given = {row.name: value}, {}, {}
    if place == "environment":
        given = {}, {row.variables[0]: value}, {}
    elif place == "file":
        given = {}, {}, {row.key: value}
    with pytest.raises(AiakqError, match=f"--{name.replace('_', '-')} {value} is not available: ") as caught:
        given_values((row,), *given)
    assert caught.value.id == "option_refused"
