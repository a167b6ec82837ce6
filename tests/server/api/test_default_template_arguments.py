"""Default arguments of the chat template, with --default-chat-template-kwargs."""

from __future__ import annotations

from aiakq.server.api.renderer import Renderer


def test_a_request_takes_precedence_over_the_defaults_of_the_server():
    renderer = Renderer.__new__(Renderer)
    renderer.template_defaults = {"enable_thinking": False, "style": "short"}
    given = {"add_generation_prompt": True, "enable_thinking": True}
    expected = {"add_generation_prompt": True, "enable_thinking": True, "style": "short"}
    assert renderer.template_arguments(given) == expected
