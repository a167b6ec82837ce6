"""Command lines of other servers become one of ``aiakq serve``; every option is kept, explained or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aiakq.errors import AiakqError
from aiakq.terminal.translation.checking import check_command
from aiakq.terminal.translation.rules import INCOMPLETE
from aiakq.terminal.translation.shell import EXPANSION, statements
from aiakq.terminal.translation.translator import translate

#: Command lines of public READMEs, model cards, issues and posts, with what becomes of them.
LINES = json.loads((Path(__file__).parent / "command_lines.json").read_text(encoding="utf-8"))


def notes(text: str) -> dict[str, tuple[str, str]]:
    """(status, here) of each option, by the option."""
    return {note.option: (note.status, note.here) for note in translate([text]).notes}


def test_there_are_sixty_public_lines_of_every_program():
    assert len(LINES) >= 60 and all(line["origin"].startswith("http") for line in LINES)
    tools = [translate([line["command"]]).tool for line in LINES]
    assert {tool: tools.count(tool) >= 10 for tool in set(tools)} == dict.fromkeys(
        ("vLLM", "SGLang", "llama-server", "Ollama"), True
    )


@pytest.mark.parametrize("line", LINES, ids=[f"{n}-{line['origin'][8:60]}" for n, line in enumerate(LINES)])
def test_a_public_line_is_translated_option_by_option(line):
    done = translate([line["command"]])
    assert done.command == line["result"]
    missing = [note.option.partition(" ")[0] or note.option for note in done.notes if note.status in INCOMPLETE]
    assert missing == line["missing"] and done.is_complete == (not missing)
    for note in done.notes:
        assert note.here if note.status == "kept" else note.reason, note
        assert not note.reason.endswith(".") and "\n" not in note.reason
    said = " ".join(note.option for note in done.notes)
    for option in re.findall(r"(?<![\S])--?[a-zA-Z][\w.-]*", line["command"].partition("PARAMETER")[0]):
        if option not in ("-m", "-u", "-c") and not line["command"].lstrip().startswith(("FROM", "#")):
            assert option in said or option in ("--gpus", "-p", "-v", "-e", "--env", "--physcpubind", "--membind"), (
                option
            )
    if done.is_complete:
        check_command(done.words[2:])
        (again,) = statements(done.command)
        assert [word.replace(EXPANSION, "$") for word in again.words] == [w.replace(EXPANSION, "$") for w in done.words]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("vllm serve m -tp2 -q gptq_marlin", "aiakq serve m --tensor-parallel-size 2 --quantization gptq_marlin"),
        ("vllm serve m --model-impl vllm", "aiakq serve m --model-impl aiakq"),
        ("vllm serve m --no-enable-prefix-caching", "aiakq serve m --no-enable-prefix-caching"),
        ("vllm serve m --enable-prefix-caching False", "aiakq serve m --no-enable-prefix-caching"),
        (
            "vllm serve m --speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
            """aiakq serve m --speculative-config '{"method":"ngram","num_speculative_tokens":3}'""",
        ),
        ("VLLM_CPU_KVCACHE_SPACE=4 vllm serve m", "aiakq serve m --kv-cache-memory-bytes 4G"),
        ("vllm serve m --worker-use-ray", "aiakq serve m --distributed-executor-backend ray"),
        ("vllm serve m --lora-modules a=x b=y", "aiakq serve m --lora-modules a=x --lora-modules b=y"),
        ("uv run vllm serve m –dtype half", "aiakq serve m --dtype half"),
    ],
)
def test_vllm(text, result):
    done = translate([f"{text} --host localhost"])
    host = " --host localhost"
    assert done.is_complete and done.command.replace(host, "") == result


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("--tp 2 --dp-size 2", "--tensor-parallel-size 2 --data-parallel-size 2"),
        ("--quantization w8a8_int8", ""),
        ("--tool-call-parser qwen25", "--tool-call-parser hermes --enable-auto-tool-choice"),
        ("--json-model-override-args '{\"a\": 1}'", """--hf-overrides '{"a":1}'"""),
        ("--lora-paths a=x", "--lora-modules a=x --enable-lora"),
        ("--max-total-tokens 1000", "--num-gpu-blocks-override 63"),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path d --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
            """--speculative-config '{"method":"eagle3","model":"d","num_speculative_tokens":3}'""",
        ),
    ],
)
def test_sglang(text, result):
    done = translate([f"python3 -m sglang.launch_server --model-path m --port 1 {text}"])
    assert done.is_complete
    assert done.command.replace(" --port 1", "") == f"aiakq serve m {result}".strip()


def test_the_default_sampling_of_llama_server_is_made_explicit():
    done = translate(["llama-server -m ./folder --temp 0.2 -n 100 --top-k 0 --repeat-penalty 1.1 --port 1"])
    assert done.is_complete and done.objects == {
        "--override-generation-config": {
            **{"temperature": 0.2, "max_new_tokens": 100, "top_k": 0, "repetition_penalty": 1.1},
            **{"top_p": 0.95, "min_p": 0.05},
        }
    }


@pytest.mark.parametrize(
    ("text", "option", "status"),
    [
        ("vllm serve m --quantization fp8_per_block", "--quantization fp8_per_block", "lost"),
        ("vllm serve m --quantization nonsense", "--quantization nonsense", "lost"),
        ("vllm serve m --middleware x.y", "--middleware x.y", "lost"),
        ("vllm serve m --swap-space 8", "--swap-space 8", "ignored"),
        ("vllm serve m --max-model-len long", "--max-model-len long", "lost"),
        ("vllm serve m --no-such-flag 3 --port 1", "--no-such-flag 3", "lost"),
        ("vllm serve https://host/m", "https://host/m", "lost"),
        ("vllm serve m --tool-call-parser minimax_m2", "--tool-call-parser minimax_m2", "lost"),
        ("vllm serve m --kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4", "differs"),
        (
            'vllm serve m --speculative-config \'{"method": "ernie_mtp"}\'',
            '--speculative-config {"method": "ernie_mtp"}',
            "ignored",
        ),
        ("sglang serve m --enable-priority-scheduling", "--enable-priority-scheduling", "differs"),
        ("sglang serve m --nnodes 2", "--nnodes 2", "lost"),
        ("llama-server -m f --mirostat 2", "--mirostat 2", "lost"),
        ("llama-server -m f --mirostat 0", "--mirostat 0", "ignored"),
        ("llama-server -m f --grammar-file g", "--grammar-file g", "lost"),
        ("llama-server -m f -ctk q4_0", "-ctk q4_0", "differs"),
    ],
)
def test_what_cannot_be_kept_is_said(text, option, status):
    done = translate([text])
    (note,) = (note for note in done.notes if note.option.strip() == option)
    assert note.status == status and note.reason
    assert done.is_complete == (status == "ignored")


def test_options_that_the_parser_refuses_together_are_said():
    done = translate(["vllm serve m --hf-overrides '[1]'"])
    assert not done.is_complete
    with pytest.raises(AiakqError):
        check_command(["m", "--port", "x"])


def test_a_container_is_replaced_by_its_paths_ports_and_devices():
    done = translate(
        [
            "docker run --gpus '\"device=1\"' -p 127.0.0.1:9000:8000 -v /data:/models -e HF_TOKEN=t --env-file f "
            "vllm/vllm-openai:latest --model /models/x --api-key k"
        ]
    )
    assert done.command == (
        "CUDA_VISIBLE_DEVICES=1 HF_TOKEN=t aiakq serve /data/x --api-key k --host 127.0.0.1 --port 9000"
    )
    assert [note.option for note in done.notes if note.status == "lost"] == ["--env-file f"]


def test_a_public_address_needs_no_key_only_if_that_is_said():
    assert "--allow-no-key" in translate(["vllm serve m"]).options
    for keyed in ("vllm serve m --api-key k", "VLLM_API_KEY=k vllm serve m", "vllm serve m --host 127.0.0.1"):
        assert "--allow-no-key" not in translate([keyed]).options


def test_a_modelfile(tmp_path):
    file = tmp_path / "Modelfile"
    file.write_text('FROM ./model\nPARAMETER num_ctx 2048\nPARAMETER temperature 0\nSYSTEM """Be\nkind."""\n')
    for text in (str(file), file.read_text(), f"ollama create mine -f {file}"):
        done = translate([text])
        assert done.words[2:6] == ["./model", "--max-model-len", "2048", "--port"]
        assert done.objects["--override-generation-config"] == {"temperature": 0, "top_k": 40, "top_p": 0.9}
        assert [note.option.split()[0] for note in done.notes if note.status == "lost"] == ["SYSTEM"]
    file.write_text("no instructions")
    with pytest.raises(AiakqError, match="no line FROM"):
        translate([str(file)])


@pytest.mark.parametrize(
    "text", ["ls", "", "vllm chat", "docker ps", "docker run ubuntu ls", "python x.py", "ollama list", "vllm serve 'm"]
)
def test_what_starts_no_server_is_refused(text):
    with pytest.raises(AiakqError) as caught:
        translate([text])
    assert caught.value.id == "usage"


def test_words_that_a_shell_has_split_are_not_split_again():
    done = translate(["vllm", "serve", "my model", "--host", "localhost"])
    assert done.command == "aiakq serve 'my model' --host localhost"
