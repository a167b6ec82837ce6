"""LangChain: an agent with two tools for three turns, streamed and not, and structured output."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "<|rain|>"


@tool
def get_time(zone: str, exact: bool = False) -> str:
    """The time in a zone."""
    assert zone == "CET"
    return "<|noon|>"


class Answer(BaseModel):
    yes: bool


model = ChatOpenAI(model="agent", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
agent = create_agent(model, tools=[get_weather, get_time])
question = {"messages": [{"role": "user", "content": "<|ask|>"}]}
messages = agent.invoke(question)["messages"]
assert [message.type for message in messages] == ["human", "ai", "tool", "ai", "tool", "ai"]
assert messages[1].tool_calls[0]["args"] == {"city": "Rome"} and messages[3].tool_calls[0]["name"] == "get_time"
assert messages[-1].content == "It rains at noon."
pieces = [piece for piece, _ in agent.stream(question, stream_mode="messages")]
assert pieces[-1].type in ("AIMessageChunk", "ai")
assert "".join(piece.content for piece in pieces if piece.type == "AIMessageChunk").endswith("It rains at noon.")
structured = ChatOpenAI(model="agent", base_url=f"{sys.argv[1]}/v1", api_key="none", max_tokens=200, temperature=0)
for method in ("json_schema", "function_calling"):
    assert isinstance(structured.with_structured_output(Answer, method=method).invoke("<|ask|>"), Answer), method
