"""The playground's page and its settings: the policy, the fields, other servers. In a browser: test_browser.py."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest

from aiakq.arguments.server import checked
from aiakq.errors import AiakqError
from aiakq.server.api.routes import load_routes
from aiakq.server.api.sampling_fields import SAMPLING_FIELDS
from aiakq.server.http.http_server import Gateway
from aiakq.server.http.pages import PACKAGE, page_response, playground_page

PAGES = [file.name for file in files(PACKAGE).iterdir() if file.name.endswith(".html")]


class Elements(HTMLParser):
    """The texts of the scripts and styles of a page, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.attributes: list[tuple[str, str, str]] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        self._tag = ""

    def handle_data(self, data):
        if self._tag in self.texts:
            self.texts[self._tag].append(data)


def policy_of(headers) -> dict[str, str]:
    directives = (part.strip().partition(" ") for part in headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in directives}


@pytest.mark.parametrize("file", PAGES)
def test_the_policy_allows_the_scripts_and_styles_of_the_page_and_nothing_else(file):
    response = page_response(file)
    policy, elements = policy_of(response.headers), Elements(bytes(response.body).decode())
    for tag, texts in elements.texts.items():
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert policy[f"{tag}-src"] == " ".join(f"'sha256-{each}'" for each in hashes) and hashes
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff" and response.headers["x-frame-options"] == "DENY"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("file", PAGES)
def test_a_page_loads_nothing_and_makes_no_html_of_text(file):
    text = files(PACKAGE).joinpath(file).read_text(encoding="utf-8")
    elements = Elements(text)
    loaded = [value for _, name, value in elements.attributes if name in ("src", "href", "action", "srcset", "poster")]
    assert all(value.startswith("data:") for value in loaded)
    assert not [name for _, name, _ in elements.attributes if name.startswith("on") or name == "style"]
    [style], [script] = elements.texts["style"], elements.texts["script"]
    assert not re.search(r"url\(|@import", style)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", script)
    assert not re.search(r"document\.cookie|sessionStorage|indexedDB", script)


def test_the_settings_are_those_of_the_model(http):
    assert http.get("/").headers["content-type"].startswith("text/html")
    settings = http.get("/playground/settings").json()
    assert settings["models"] == ["tinybooks", "alias/name"] and settings["task"] == "generate"
    assert settings["chat"] and settings["structured"] and settings["max_model_len"] == 1024
    assert settings["max_images"] == 0
    for kind in ("chat", "completion"):
        fields = settings["fields"][kind]
        assert set(fields) == set(SAMPLING_FIELDS)
        assert all(field["description"] for field in fields.values())
    tokens = settings["fields"]["completion"]["stop_token_ids"]["anyOf"][0]["items"]
    assert tokens["maximum"] == http.get("/v1/models").json()["data"][0]["vocab_size"] - 1


def test_the_page_is_open_and_the_settings_need_a_key_under_a_path_too(start_server):
    with (
        start_server(root_path="/llm/", api_key=["secret"], num_gpu_blocks_override=65) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        for path in ("/", "/llm/", "/llm"):
            assert client.get(path).status_code == 200 and "<title>" in client.get(path).text
        for prefix in ("", "/llm"):
            assert client.get(f"{prefix}/playground/settings").status_code == 401
            key = {"authorization": "Bearer secret"}
            assert client.get(f"{prefix}/playground/settings/", headers=key).status_code == 200


def test_the_playground_may_call_the_listed_servers():
    args = checked({"model": "m", "playground_servers": ["http://127.0.0.1:8001/", "/other"]}, server=True)
    assert args.playground_servers == ["http://127.0.0.1:8001", "/other"]
    policy = policy_of(playground_page(args.playground_servers).headers)
    assert policy["connect-src"] == "'self' http://127.0.0.1:8001"


@pytest.mark.parametrize(
    "url", ["", "/", "//host", "host:80", "ftp://host", "http://a;script-src *", "http://a b", "x"]
)
def test_other_servers_are_named_by_addresses(url):
    with pytest.raises(AiakqError) as caught:
        checked({"model": "m", "playground_servers": [url]}, server=True)
    assert caught.value.id == "bad_option" and "--playground-servers" in str(caught.value)


def test_the_playground_can_be_left_out():
    args = checked({"model": "m", "disable_playground": True}, server=True)
    assert not {"/", "/playground/settings"} & {route.path for route in load_routes(args)}


def test_the_page_is_served_while_the_model_loads():
    async def status(path: str, **changes) -> int:
        args = checked({"model": "m", "root_path": "/llm", **changes}, server=True)
        transport = httpx.ASGITransport(Gateway(args))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(status("/")) == asyncio.run(status("/llm/")) == 200
    assert asyncio.run(status("/playground/settings")) == 503
    assert asyncio.run(status("/", disable_playground=True)) == 503
