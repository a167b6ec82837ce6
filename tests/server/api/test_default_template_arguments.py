"""Default arguments of the chat template, with --default-chat-template-kwargs."""

from __future__ import annotations

from aiakq.server.api.service import Service
from aiakq.server.api.service_options import ServiceOptions


def test_a_request_takes_precedence_over_the_defaults_of_the_server():
    service = Service.__new__(Service)
    service.options = ServiceOptions(template_kwargs={"enable_thinking": False, "style": "short"})
    given = {"add_generation_prompt": True, "enable_thinking": True}
    expected = {"add_generation_prompt": True, "enable_thinking": True, "style": "short"}
    assert service.template_arguments(given) == expected
