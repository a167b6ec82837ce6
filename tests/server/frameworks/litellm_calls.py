"""LiteLLM: calls of tools over three turns, streamed and not, its Responses API, and an error of the server by name."""

import json
import sys

import litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
        },
    }
    for name, key in (("get_weather", "city"), ("get_time", "zone"))
]
RESULTS = {"get_weather": "<|rain|>", "get_time": "<|noon|>"}
options = {"model": "openai/agent", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "tools": TOOLS}

for streamed in (False, True):
    messages = [{"role": "user", "content": "<|ask|>"}]
    while True:
        answer = litellm.completion(messages=messages, stream=streamed, **options)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert json.loads(call.function.arguments) in ({"city": "Rome"}, {"zone": "CET"})
            result = {"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]}
            messages.append(result)
    assert message.content == "It rains at noon." and len(messages) == 6, messages

response = litellm.responses(model="openai/agent", api_base=options["api_base"], api_key="none", input="<|noon|>")
assert response.output[0].content[0].text == "It rains at noon."
try:
    litellm.completion(messages=[{"role": "user", "content": "<|ask|>"}], temperature=-1, **options)
    raise AssertionError("a temperature below 0 was taken")
except litellm.BadRequestError as failure:
    assert "temperature" in str(failure)
