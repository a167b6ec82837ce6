"""The playground in a browser: what models write, keys, failures, other servers, the keyboard."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from browsing import Page, open_browser, proxy
from chat_scripts import ARGUMENTS, SCRIPTS, SPECIAL, TEMPLATE, TOOLS
from reciting_model import write_model

from aiakq.server.background import RunningServer, start_in_background

pytestmark = pytest.mark.slow

EVIL = [
    "<img src=x ",
    "onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "<style>body{display:none}</style>",
    "</div></main><iframe srcdoc='<script>parent.document.title=1</script>'>",
    "javascript:alert(1) ",
    "\u202eltr ",
    "&eacute;</span>",
]
KEY = "sk-very-secret-4711"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Iterator[RunningServer]:
    """A model that writes HTML, calls tools and reasons, behind a key."""
    folder = tmp_path_factory.mktemp("models") / "hostile"
    write_model(folder, {**SCRIPTS, "<|evil|>": EVIL}, TEMPLATE, SPECIAL)
    options = {**ARGUMENTS, "model": str(folder), "api_key": [KEY], "served_model_name": ["<b>hostile</b>"]}
    with start_in_background(options, timeout=240) as running:
        yield running


def open_with_key(browser: Any, url: str) -> Page:
    page = Page(browser, url)
    page.wait(lambda: "asks for an API key" in page.text("#strip"))
    page.set("#key-0", KEY)
    page.wait(lambda: page.find("#fields input"))
    return page


def test_what_a_model_writes_is_text(browser, hostile):
    page = open_with_key(browser, hostile.url)
    for logprobs in ("5", "0"):
        page.set("#logprobs", logprobs)
        page.send("<|evil|>")
        assert page.text(".turn.assistant:last-of-type .answer").startswith("".join(EVIL))
        assert not page.find("main img, main script, main style, iframe")
    page.set("#logprobs", "5")
    page.send("<script>document.title='owned'</script><|evil|>")
    page.run("document.querySelector('.token').click()")
    assert "<img src=x".replace(" ", "␣") in page.text("#popup")
    assert browser.title == "aiakq playground" and "<b>hostile</b>" in page.text(".who")
    page.one("#history summary").click()
    assert "<script>" in page.text("#history button.link")
    page.check(failures=1)  # the first request had no key


def test_a_key_is_in_memory_only(browser, hostile):
    page = open_with_key(browser, hostile.url)
    page.send("<|plain|>")
    stored = page.run(
        "return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, history.state])"
    )
    assert "plain" in stored and KEY not in stored and "sk-" not in stored
    assert KEY not in page.run("return document.documentElement.outerHTML")
    assert browser.get_cookies() == [] and page.run("return indexedDB.databases()") == []
    assert "$AIAKQ_API_KEY" in page.run("return program('curl')") and KEY not in page.run("return program('python')")
    asked = [
        json.loads(entry["message"])["message"]["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if '"Network.requestWillBeSent"' in entry["message"]
    ]
    assert asked and all(
        url.startswith((hostile.url, "data:")) and KEY not in url for url in asked if "chrome" not in url
    )
    browser.refresh()
    page.wait(lambda: "asks for an API key" in page.text("#strip"))
    assert page.one("#key-0").get_attribute("value") == ""


def test_tools_and_reasoning(browser, hostile):
    page = open_with_key(browser, hostile.url)
    page.set("#tools", json.dumps(TOOLS))
    page.send("<|both|>")
    assert page.text(".reasoning .text") == "It asks for the weather."
    assert page.text(".answer").strip().startswith("Let me look.")
    names = [one.text for one in page.find(".call .name")]
    assert names == ["get_weather", "get_time"] and '"city": "Bergen"' in page.text(".call pre")
    assert "calls tools" in page.text(".figures")
    for place, button in zip(page.find(".call textarea"), page.find(".call button"), strict=True):
        place.send_keys("sunny")
        button.click()
    roles = "return panes[0].messages.map((message) => message.role)"
    page.wait(lambda: page.run(roles) == ["user", "assistant", "tool", "tool", "assistant"])
    assert not page.find(".error")
    page.check(failures=1)


def test_every_sampling_field_is_sent(browser, server):
    page = Page(browser, server.url)
    values = {"max_tokens": "7", "temperature": "0", "stop": "\\n", "stop_token_ids": "1, 2", "logit_bias": '{"5": -3}'}
    values |= {"bad_words": "Peq", "ignore_eos": "true", "seed": "-1", "n": "2"}
    for name, value in values.items():
        page.set(f"#field-{name}", value)
    body = page.run("return requestFields()")
    expected = {"max_tokens": 7, "temperature": 0, "stop": ["\n"], "stop_token_ids": [1, 2], "logit_bias": {"5": -3}}
    expected |= {"bad_words": ["Peq"], "ignore_eos": True, "seed": -1, "n": 2}
    assert {name: body[name] for name in expected} == expected
    page.send("Once upon a time")
    assert len(page.find(".answer")) == 2 and "choice 2" in page.text(".turn.assistant")
    page.set("#field-stop_token_ids", "one")
    assert "wrong" in page.one("#field-stop_token_ids").get_attribute("class")
    page.send("again")
    assert "whole numbers" in page.text(".error")
    page.set("#field-stop_token_ids", "")
    page.set("#field-top_p", "7")
    page.send("again")
    assert "top_p" in page.text(".error")  # the server's own words
    page.set("#field-top_p", "")
    page.send("once more")
    contents = page.run("return panes[0].messages.map((message) => message.content)")
    assert not page.find(".error") and contents[0] == "Once upon a time" and contents[2:-1] == ["once more"]
    page.run("localStorage.clear()")
    page.check(failures=1)


def test_tokens_have_probabilities_and_alternatives_by_mouse_and_keyboard(browser, server):
    page = Page(browser, server.url)
    page.one("#mode-completion").click()
    page.set("#field-max_tokens", "12")
    page.set("#field-temperature", "0")
    page.send("Once upon a time")
    tokens = page.find(".answer .token")
    assert len(tokens) == 12 and "answer 12 tokens" in page.text(".figures")
    tokens[3].click()
    assert len(page.find("#popup li")) == 5 and re.search(r"log-probability -\d", page.text("#popup"))
    first = page.text("#popup code:first-child")
    page.run("document.querySelector('.answer').focus()")
    from selenium.webdriver.common.keys import Keys

    page.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.text("#popup code:first-child") != first
    assert "%" in page.text("#live")
    page.wait(lambda: re.search(r"KV cache .* · \d+ tokens/s · first token after \d+ ms", page.text("#strip")))
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not page.one("#popup").is_displayed()
    assert page.text(".answer") == page.text(".answer .token")
    page.run("localStorage.clear()")
    page.check()


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([("é", ["\ufffd", "\ufffd"]), ("ab", ["ab"])], ["é", "ab"]),
        ([("", ["\ufffd"]), ("éab", ["\ufffd", "ab"])], ["é", "ab"]),
        ([("", ["<think>", "a"]), ("a b", [" b"])], ["a", " b"]),  # a mark that is not in the text
        ([("a", ["ab"]), ("b", [])], ["a", "b"]),  # a part of it was held back
        ([("b c", [" b", " c"])], ["b", " c"]),  # without the space in front
        ([("abc", [])], []),  # text without tokens, like an echoed prompt
    ],
    ids=str,
)
def test_tokens_are_found_in_the_text(browser, server, chunks, shown):
    if not browser.current_url.startswith(server.url):
        Page(browser, server.url)
    script = """
        const answer = new Answer(document.createElement("div"), panes[0]);
        const entry = (text) => ({text, logprob: -1, top: []});
        for (const [text, tokens] of arguments[0]) answer.add(text, tokens.map(entry));
        return [answer.tokens.map((token) => token.text), answer.place.textContent];
    """
    assert browser.execute_script(script, chunks) == [shown, "".join(text for text, _ in chunks)]


def test_the_keyboard_alone_is_enough(browser, server):
    from selenium.webdriver.common.keys import Keys

    with proxy(server.url, "/held", hold_after=20_000) as url:
        page = Page(browser, f"{url}/held/")
        page.set("#field-max_tokens", "900")
        page.set("#field-ignore_eos", "true")
        body = page.one("body")
        page.run("document.activeElement.blur()")
        body.send_keys("/")
        page.browser.switch_to.active_element.send_keys("A long story", Keys.ENTER)
        page.wait(lambda: len(page.text(".answer")) > 20)
        page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        page.finish()
        assert "stopped" in page.text(".figures") and not page.find(".error")
        page.run("document.activeElement.blur()")
        body.send_keys("?")
        assert page.one("#help").is_displayed()
        body.send_keys(Keys.ESCAPE)
        names = page.run(
            "return [...document.querySelectorAll('input, select, textarea, button, a')].filter((one) => !(one.labels"
            "?.length || one.getAttribute('aria-label') || one.textContent.trim())).map((one) => one.outerHTML)"
        )
        assert names == [], "controls without a name"
        page.run("localStorage.clear()")
        page.check()


def test_escape_stops_although_the_mouse_lies_over_a_token(browser, server):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    with proxy(server.url, "/held", hold_after=20_000) as url:
        page = Page(browser, f"{url}/held/")
        page.set("#field-max_tokens", "900")
        page.set("#field-ignore_eos", "true")
        page.send("A long story", finish=False)
        page.wait(lambda: len(page.find(".answer .token")) > 5)
        ActionChains(browser).move_to_element(page.find(".answer .token")[2]).perform()
        page.wait(lambda: page.one("#popup").is_displayed())
        page.one("#prompt").send_keys(Keys.ESCAPE)
        page.finish()
        assert "stopped" in page.text(".figures") and not page.one("#popup").is_displayed()
        page.run("localStorage.clear()")
        page.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_have_no_barriers(browser, server, theme):
    page = Page(browser, server.url)
    page.run("setTheme(arguments[0])", theme)
    page.set("#field-max_tokens", "16")
    page.send("Once upon a time")
    page.run("for (const one of document.querySelectorAll('details')) one.open = true")
    page.run("document.querySelector('.answer .token').click()")
    assert page.barriers() == []
    assert page.run("return document.documentElement.scrollHeight <= innerHeight"), "only the panes scroll"
    page.one("#help-button").click()
    assert page.barriers() == []
    page.run("localStorage.clear()")
    page.check()
    docs = Page(browser, f"{server.url}/docs")
    docs.wait(lambda: docs.find(".operation"))
    docs.one(".operation summary").click()
    assert docs.barriers() == []


def test_two_servers_side_by_side(browser, start_server):
    few = {"num_gpu_blocks_override": 129}
    with start_server(**few, served_model_name=["other"], allowed_origins=["*"]) as other:
        with start_server(**few, playground_servers=[other.url]) as first:
            page = Page(browser, first.url)
            page.set("#field-max_tokens", "16")
            page.one("#mode-completion").click()
            page.one("#compare").click()
            page.wait(lambda: page.text("#model-1") == "other")
            page.send("Once upon a time")
            assert "The first 16 tokens are the same. That is all of them." in page.text("#difference")
            assert page.text(".pane:first-child .answer") == page.text(".pane:last-child .answer") != ""
            other.kill()
            other.process.wait()
            page.send("Once upon a time")
            assert f"No connection to {other.url}" in page.text(".pane:last-child .error")
            assert "--allowed-origins" in page.text(".error") and len(page.text(".pane:first-child .answer")) > 10
            page.run("localStorage.clear()")
            page.check(failures=1)


def test_a_server_that_is_killed_in_the_middle(browser, start_server):
    with start_server(num_gpu_blocks_override=129) as server:
        page = Page(browser, server.url)
        page.set("#field-ignore_eos", "true")
        page.set("#field-max_tokens", "1000")
        page.send("A long story", finish=False)
        page.wait(lambda: len(page.text(".answer")) > 20)
        server.kill()
        page.finish()
        said = page.text(".error")
        assert "ended in the middle of the answer" in said and "TypeError" not in said
        assert len(page.text(".answer")) > 20
        assert page.violations == []
        page.run("localStorage.clear()")


def test_under_the_path_of_a_proxy_that_removes_it(browser, hostile):
    with proxy(hostile.url, "/models/a") as url:
        page = open_with_key(browser, f"{url}/models/a/")
        page.send("<|plain|>")
        assert page.text(".answer").startswith("Hello, world.")
        assert f"{url}/models/a/v1/chat/completions" in page.run("return program('curl')")
        page.check(failures=1)


def test_the_description_of_the_api(browser, hostile, http):
    with proxy(hostile.url, "/models/a") as url:
        browser.get("about:blank")
        page = Page(browser, f"{url}/models/a/docs")
        page.wait(lambda: "API key" in page.text(".error"))
        page.set("#key", KEY)
        page.wait(lambda: page.find(".operation"))
        paths = [one.text for one in page.find(".path")]
        assert set(http.get("/openapi.json").json()["paths"]) <= set(paths)
        page.run("document.querySelectorAll('.operation').forEach((one) => (one.open = true))")
        page.wait(lambda: len(page.find(".operation pre")) == len(paths))
        assert "repetition_penalty" in page.text("td") and "unknown_field" in page.text(".note")
        assert '"<b>hostile</b>"' in page.text("td") and not page.find("td b")
        page.set("#filter", "abort")
        page.run("document.getElementById('filter').dispatchEvent(new Event('input'))")
        assert [one.text for one in page.find(".path") if one.is_displayed()] == ["/abort_requests"]
        page.set("#filter", "chat/completions")
        page.run("document.getElementById('filter').dispatchEvent(new Event('input'))")
        [place] = [one for one in page.find(".operation") if "/v1/chat/completions" in one.text]
        place.find_element("css selector", "button").click()
        page.wait(lambda: '"object": "chat.completion"' in place.text)
        assert KEY not in page.run("return document.documentElement.outerHTML + JSON.stringify({...localStorage})")
        page.check(failures=1)


def test_on_a_telephone_nothing_is_wider_than_the_screen(server):
    driver = open_browser()
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}  # windows are 500 wide at least
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page = Page(driver, server.url)
        page.send("Once")
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
        assert not page.one("#settings").is_displayed()
        page.one("#open-settings").click()
        assert page.one("#field-temperature").is_displayed()
        page.check()
    finally:
        driver.quit()
