"""Scripts of the scripted model for tests of conversations, its chat template, and the server's arguments."""

from __future__ import annotations

TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} of {{ call.id }}
{%- for name, value in call.function.arguments | items %} {{ name }}={{ value }}{% endfor %}</tool_call>{% endfor %}
{%- if message.tool_call_id %} for {{ message.tool_call_id }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and open_thought %}<think>{% endif %}
{%- if add_generation_prompt and closed_thought %}<think>

</think>

{% endif %}"""

SCRIPTS = {
    "<|both|>": [
        "<think>",
        "It asks for",
        " the weather.",
        "</think>",
        "\n\nLet me",
        " look.\n",
        "<tool_call>",
        '\n{"name": "get_wea',
        'ther", "arguments": {',
        '"city": "Ber',
        'gen", "days": ',
        "[1,",
        " {}]}}\n",
        "</tool_call>",
        '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool',
        "_call>\n",
    ],
    "<|plain|>": ["Hel", "lo, ", "wor", "ld.\n\n", "- a\n", "<|odd|>", "- b"],
    "<|mention|>": ["<think>I could write", " <tool_call>{", " tags here, but no.", "</think>\n\n", "Hello", " there."],
    "<|unclosed|>": [
        "<think>I look",
        " it up.\n<tool",
        '_call>\n{"name": "get_weather", "arguments": {"city": ',
        '"Oslo"}}\n',
        "</tool",
        "_call>",
    ],
    "<|wrong|>": ["<think>No:", " <tool_call>", '{"name": "get_weather", "arguments": {"city": 1}}', "\n</tool_call>"],
    "<|broken|>": ["Like ", "<tool_", "call>", "so", " {it", " goes"],
}
SPECIAL = ("<tool_call>", "</tool_call>", "<|odd|>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
            "strict": False,
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
ARGUMENTS = {
    "dtype": "float32",
    "num_gpu_blocks_override": 513,
    "served_model_name": ["scripted"],
    "enable_auto_tool_choice": True,
    "enable_reasoning": True,
    "enable_admin_routes": True,
}
