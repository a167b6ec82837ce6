"""The offline API: vLLM's names and shapes, text, stop strings, log-probabilities, errors."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest

from aiakq import LLM, CompletionOutput, RequestOutput, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llm(example_model) -> LLM:
    return LLM(model=str(example_model), dtype="float32")


def test_a_vllm_script_runs_with_its_import_line_changed(example_model):
    script = f"""
from aiakq import LLM, SamplingParams
prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
llm = LLM(model={str(example_model)!r}, tensor_parallel_size=1, gpu_memory_utilization=0.5, enforce_eager=True, seed=0)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")
print(llm.get_tokenizer().decode(outputs[0].outputs[0].token_ids) == outputs[0].outputs[0].text)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Prompt:") == 2 and done.stdout.rstrip().endswith("True")


def test_results_have_vllms_shapes(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1, n=2)
    result = llm.generate("Once upon a time", params, use_tqdm=False)[0]
    assert isinstance(result, RequestOutput) and result.finished and result.prompt == "Once upon a time"
    assert len(result.outputs) == 2 and isinstance(result.outputs[0], CompletionOutput)
    output = result.outputs[0]
    assert output.finish_reason == "length" and output.index == 0 and len(output.token_ids) == 5
    assert len(output.logprobs) == 5
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(position)) == token and position[token].rank == 1
        assert 2 <= len(position) <= 3
        assert position[token].decoded_token == llm.get_tokenizer().decode([token])
    assert output.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for token, position in zip(output.token_ids, output.logprobs, strict=True)),
        abs=1e-4,
    )
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    for token, position in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        assert token in position
    assert result.metrics.first_token_time >= result.metrics.arrival_time


def test_prompt_logprobs_match_transformers_however_the_prompt_is_cut(example_model, heldout_text):
    import torch
    from transformers import AutoModelForCausalLM

    small = LLM(model=str(example_model), dtype="float32", max_num_batched_tokens=7)
    result = small.generate(heldout_text[:400], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)[0]
    assert result.outputs[0].token_ids == [] and result.outputs[0].finish_reason == "length"
    ids = torch.tensor([result.prompt_token_ids])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(example_model, dtype=torch.float32)(ids).logits[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    found = [next(iter(position.values())).logprob for position in result.prompt_logprobs[1:]]
    assert torch.allclose(torch.tensor(found), wanted, atol=1e-4)


def test_stop_strings_end_the_text_wherever_they_fall(llm):
    params = SamplingParams(temperature=0, max_tokens=40)
    full = llm.generate("Alice was", params, use_tqdm=False)[0].outputs[0]
    for start in (3, 10, 21):
        stop = full.text[start : start + 7]
        cut = full.text[: full.text.find(stop)]
        result = llm.generate("Alice was", SamplingParams(temperature=0, max_tokens=40, stop=stop), use_tqdm=False)
        output = result[0].outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == (cut, "stop", stop)
        assert output.token_ids == full.token_ids[: len(output.token_ids)]
        included = SamplingParams(temperature=0, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
        assert llm.generate("Alice was", included, use_tqdm=False)[0].outputs[0].text == cut + stop
    llm.engine.check()
    assert not llm.engine.has_work()


def test_stop_token_is_returned_but_not_shown(llm):
    params = SamplingParams(temperature=0, max_tokens=40)
    full = llm.generate("Alice was", params, use_tqdm=False)[0].outputs[0]
    token = full.token_ids[4]
    first = full.token_ids.index(token)
    stopped = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[token])
    output = llm.generate("Alice was", stopped, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == full.token_ids[: first + 1]
    assert output.finish_reason == "stop" and output.stop_reason == token
    assert output.text == llm.tokenizer.decode(full.token_ids[:first])


def test_seeded_sampling_repeats_alone_and_in_a_crowd(llm):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=20, n=3)
    alone = llm.generate("The sea", params, use_tqdm=False)[0]
    crowd = llm.generate(
        ["A dog"] * 5 + ["The sea"], [SamplingParams(seed=4, max_tokens=9)] * 5 + [params], use_tqdm=False
    )
    assert [o.token_ids for o in crowd[-1].outputs] == [o.token_ids for o in alone.outputs]
    assert len({tuple(o.token_ids) for o in alone.outputs}) == 3, "n sequences are n draws"
    assert len({tuple(r.outputs[0].token_ids) for r in crowd[:5]}) == 1


def test_a_cache_salt_keeps_prefixes_apart(llm):
    ids = list(range(5, 60))

    def cached(*salts):
        prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in salts]
        results = llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        return [result.num_cached_tokens > 0 for result in results]

    assert cached("a", "b") == [False, False]
    assert cached("b", "c", "a") == [True, False, True]
    assert cached("") == [False]


def test_bad_calls_leave_the_engine_clean(llm):
    with pytest.raises(AiakqError) as caught:
        llm.generate(["fine", {"prompt_token_ids": [99999]}], use_tqdm=False)
    assert caught.value.id == "invalid_token_id"
    with pytest.raises(AiakqError) as caught:
        llm.generate({"prompt_token_ids": [5] * 2000}, use_tqdm=False)
    assert caught.value.id == "context_length_exceeded" and "1024" in str(caught.value)
    with pytest.raises(AiakqError):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(AiakqError):
        llm.generate([[]], use_tqdm=False)
    assert not llm.engine.has_work()
    assert llm.generate("still works", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    "values",
    [{"sampling_params": {"max_tokens": 1}}, {"sampling_params": [{}]}, {"priority": "1"}, {"lora_request": "a"}],
)
def test_values_for_each_prompt_of_another_type_are_refused_by_name(llm, values):
    (name,) = values
    for call, given in ((llm.generate, "text"), (llm.chat, [{"role": "user", "content": "text"}])):
        with pytest.raises(AiakqError, match=f"{name} has the wrong type"):
            call(given, **values, use_tqdm=False)


def test_max_tokens_beyond_the_context_stop_at_its_end(llm):
    params = SamplingParams(max_tokens=5000, min_tokens=3000, ignore_eos=True, temperature=0)
    (found,) = llm.generate({"prompt_token_ids": [5] * 1020}, params, use_tqdm=False)
    assert (len(found.outputs[0].token_ids), found.outputs[0].finish_reason) == (4, "length")
    with pytest.raises(ValueError, match="1024"):
        llm.generate({"prompt_token_ids": [5] * 1024}, params, use_tqdm=False)


def test_what_vllm_raises_as_a_value_error_is_one(llm, example_model):
    for wrong in ({"temperature": -1.0}, {"top_p": 2.0}, {"n": "two"}, {"stop": ""}):
        with pytest.raises(ValueError):
            SamplingParams(**wrong)
    for prompt in ([], {"prompt_token_ids": [99999]}):
        with pytest.raises(ValueError):
            llm.generate(prompt or [[]], use_tqdm=False)
    for arguments in ({"max_model_len": 5000}, {"enable_sleep_mode": True}, {"dtype": "int3"}, {"runner": "draft"}):
        with pytest.raises(ValueError):
            LLM(str(example_model), **arguments)
    with pytest.raises(AiakqError) as caught:
        LLM("./no-such-model")
    assert not isinstance(caught.value, ValueError)


def test_keys_of_generation_config_that_are_not_applied_are_named(tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"no_repeat_ngram_size": 3, "num_beams": 1}')
    with pytest.warns(UserWarning, match="not applied: no_repeat_ngram_size 3") as found:
        LLM(str(folder), dtype="float32")
    assert not any("num_beams" in str(warning.message) for warning in found)


def test_defaults_of_newer_arguments_are_accepted(example_model):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        LLM(str(example_model), runner="auto", convert="auto", num_gpu_blocks_override=20)


def test_chat_uses_the_template(llm):
    result = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=3), use_tqdm=False)[0]
    assert result.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("messages", ["hello", [], {"role": "user", "content": "a"}, None, ["a"], [[]], [1], [[1]]])
def test_chat_names_what_is_no_conversation(llm, messages):
    with pytest.raises(AiakqError, match="is expected") as caught:
        llm.chat(messages, use_tqdm=False)
    assert caught.value.id == "invalid_type" and caught.value.param.startswith("messages")


@pytest.mark.parametrize(
    "schema", [{"enum": {1, 2}}, {"const": 10**5000}, {"const": b"a"}], ids=["set", "long", "bytes"]
)
def test_a_schema_that_is_no_json_is_refused_by_name(llm, schema):
    with pytest.raises(AiakqError, match="it cannot be written as JSON") as caught:
        llm.generate("a", SamplingParams(structured_outputs={"json": schema}), use_tqdm=False)
    assert caught.value.id == "invalid_type" and caught.value.param == "structured_outputs.json"


def test_chat_takes_tools_and_past_calls(llm):
    template = (
        "{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}{% for message in messages %}"
        "{{ message.role }}:{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.arguments.items() | list }}{% endfor %};{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    options = {"sampling_params": SamplingParams(max_tokens=1), "use_tqdm": False, "chat_template": template}
    tool = {"type": "function", "function": {"name": "f"}}
    [result] = llm.chat(messages, tools=[tool], **options)
    assert result.prompt == f"[{json.dumps(tool)}]user:Hi;assistant:[('a', 1)];tool:2;"


@pytest.mark.parametrize("tools", ["x", {"type": "function"}, ["x"], [1]])
def test_chat_names_what_is_no_tool(llm, tools):
    with pytest.raises(AiakqError, match="is expected") as caught:
        llm.chat([{"role": "user", "content": "Hi"}], tools=tools, use_tqdm=False)
    assert caught.value.id == "invalid_type" and caught.value.param.startswith("tools")


def test_chat_names_calls_that_are_none(llm):
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": "x"}]
    with pytest.raises(AiakqError, match="a list of calls is expected") as caught:
        llm.chat(asked, use_tqdm=False)
    assert caught.value.id == "invalid_type" and caught.value.param == "messages[1].tool_calls"


def test_chat_continues_the_last_message(llm):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It was"}]
    options = {"sampling_params": SamplingParams(max_tokens=1), "use_tqdm": False, "continue_final_message": True}
    [result] = llm.chat(messages, add_generation_prompt=False, **options)
    assert result.prompt.endswith("<|im_start|>assistant\nIt was")
    with pytest.raises(AiakqError, match="goes without a generation prompt"):
        llm.chat(messages, **options)


def _copy(example_model, folder, **changes):
    import shutil

    shutil.copytree(example_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "arguments, id",
    [
        ({"nonsense": 1}, "usage"),
        ({"dtype": "int3"}, "bad_option"),
        ({"max_num_seqs": 0}, "bad_option"),
        ({"max_model_len": 5000}, "bad_option"),
        ({"quantization": "awq"}, "quantization_mismatch"),
        ({"quantization": "foo"}, "bad_option"),
        ({"max_num_batched_tokens": 10, "enable_chunked_prefill": False}, "option_conflict"),
        ({"pipeline_parallel_size": 65}, "bad_option"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_wrong_arguments_are_refused(example_model, arguments, id):
    import torch

    if id == "device" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(AiakqError) as caught:
        LLM(model=str(example_model), **arguments)
    assert caught.value.id == id


@pytest.mark.parametrize(
    "changes, id",
    [
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}, "model_unsupported"),
        ({"hidden_size": 128}, "tensor_inventory"),
        ({"num_hidden_layers": 7}, "tensor_inventory"),
        ({"num_hidden_layers": 5}, "tensor_inventory"),
        ({"num_hidden_layers": 9999}, "tensor_inventory"),
        ({"num_hidden_layers": 2**40}, "model_malformed"),
        ({"num_key_value_heads": 3}, "model_malformed"),
        ({"hidden_act": "magic"}, "unsupported"),
        ({"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}, "unsupported"),
        ({"quantization_config": {"quant_method": "odd"}}, "format_unsupported"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configs_that_lie_are_refused_by_name(example_model, tmp_path, changes, id):
    with pytest.raises(AiakqError) as caught:
        LLM(model=str(_copy(example_model, tmp_path / "model", **changes)))
    assert caught.value.id == id


def test_missing_and_half_written_models(example_model, tmp_path):
    with pytest.raises(AiakqError) as caught:
        LLM(model=str(tmp_path / "nothing"))
    assert caught.value.id == "model_missing"
    folder = _copy(example_model, tmp_path / "model")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(AiakqError) as caught:
        LLM(model=str(folder))
    assert caught.value.id in ("model_malformed", "model_incomplete")
    (folder / "config.json").write_text("{ not json")
    with pytest.raises(AiakqError) as caught:
        LLM(model=str(folder))
    assert caught.value.id == "model_malformed"


def test_chat_reads_parts_in_the_form_of_the_template(llm):
    options = {"sampling_params": SamplingParams(max_tokens=1), "use_tqdm": False}
    parts = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}parts{% endif %}{% endfor %}"

    def prompt(content, template, **more):
        messages = [{"role": "user", "content": content}]
        return llm.chat(messages, chat_template=template, **options, **more)[0].prompt

    assert prompt("Hi", parts) == "<Hi>"
    assert prompt(["Hi", {"type": "input_text", "text": "there"}], parts) == "<Hi><there>"
    assert prompt(["Hi", "there"], both, chat_template_content_format="string") == "Hi\nthere"
    assert prompt("cut \ud83c", both) == "cut \ufffd"
    for template, says in (("{{ 'Hello' }}", "leaves out the text of users"), ("{% if %}", "line 1: ")):
        with pytest.raises(AiakqError, match=says):
            prompt("Hi", template)
    with pytest.raises(AiakqError, match="auto, string, openai"):
        prompt("Hi", parts, chat_template_content_format="parts")
    with pytest.raises(AiakqError, match="chat_template_kwargs.messages"):
        prompt("Hi", parts, chat_template_kwargs={"messages": []})
    with pytest.raises(AiakqError, match="only text is read"):
        prompt([{"type": "image_url", "image_url": {}}], parts)


def test_chat_lists_tools_where_the_template_has_no_place(llm):
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    options = {"sampling_params": SamplingParams(max_tokens=1), "use_tqdm": False}
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    [result] = llm.chat([{"role": "user", "content": "Hi"}], tools=[tool], chat_template=template, **options)
    assert result.prompt.startswith("[system]") and json.dumps(tool) in result.prompt
    assert result.prompt.endswith("[user]Hi")


def test_an_executor_is_freed_with_its_last_reference(example_model):
    """It then ends the processes of other ranks, which garbage collection would do some time later."""
    llm = LLM(str(example_model))
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    executor = weakref.ref(llm.engine.executor)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert executor() is None
    finally:
        gc.enable()


def test_ends_that_are_texts_or_beyond_the_vocabulary_are_named_at_load(example_model, tmp_path, caplog):
    """As by a server: the first refuse structured output, the others are left out."""
    tokenizer = Tokenizer.load(example_model)
    brace = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"}")
    folder = _copy(example_model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, brace, 10**6]}))
    with pytest.warns(UserWarning, match=f"Structured output is refused: the end-of-sequence token {brace} is "):
        llm = LLM(str(folder), num_gpu_blocks_override=20)
    assert llm.engine.limits.eos_token_ids == (1, brace)
    assert "1000000 of the generation config is left out" in caplog.text
    with pytest.raises(AiakqError, match="which no other tokens can spell") as caught:
        llm.generate("a", SamplingParams(structured_outputs={"json": {"type": "object"}}), use_tqdm=False)
    assert caught.value.id == "grammar_not_enforceable" and caught.value.param == "structured_outputs"
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished
