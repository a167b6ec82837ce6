"""Default arguments of the chat template, with --default-chat-template-kwargs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from aiakq.runtime.sampling_params import SamplingParams
from aiakq.server.api.service import Service


def test_a_request_takes_precedence_over_the_defaults_of_the_server():
    seen = {}

    async def run(request):
        seen.update(request.arguments)
        raise InterruptedError

    service = Service.__new__(Service)
    service.default_template_kwargs = {"enable_thinking": False, "style": "short"}
    service.text = SimpleNamespace(run=run)
    service._prompt_request = lambda params, **fields: SimpleNamespace(**fields)
    given = {"add_generation_prompt": True, "enable_thinking": True}
    try:
        asyncio.run(service.tokenize_chat([], given, False, SamplingParams()))
    except InterruptedError:
        pass
    assert seen == {"add_generation_prompt": True, "enable_thinking": True, "style": "short"}
