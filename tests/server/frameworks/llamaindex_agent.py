"""LlamaIndex: an agent with two tools for three turns, and a pydantic object as the answer."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "<|rain|>"


def get_time(zone: str) -> str:
    """The time in a zone."""
    assert zone == "CET"
    return "<|noon|>"


class Answer(BaseModel):
    yes: bool


model = OpenAILike(
    model="agent", api_base=f"{sys.argv[1]}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
    context_window=4096, max_tokens=200, temperature=0, max_retries=0,
)  # fmt: skip


async def main() -> None:
    agent = FunctionAgent(tools=[get_weather, get_time], llm=model)
    answer = await agent.run("<|ask|>")
    assert str(answer) == "It rains at noon.", answer
    assert [call.tool_name for call in answer.tool_calls] == ["get_weather", "get_time"]


asyncio.run(main())
assert isinstance(model.as_structured_llm(Answer).complete("<|ask|>").raw, Answer)
