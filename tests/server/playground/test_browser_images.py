"""Images in the playground: chosen, dropped and pasted, seen before they are sent, and kept in the conversation."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vision_models import random_image, save_vision_model

sys.path.insert(0, str(Path(__file__).parent))
from browsing import Page, open_browser

from aiakq.server.background import RunningServer, start_in_background

pytestmark = pytest.mark.slow

#: Hands files to the page as ``arguments[0]``, an event, has them: each a name, a type and base64.
TRANSFER = """
    const [kind, target, files] = arguments;
    const transfer = new DataTransfer();
    for (const [name, type, data] of files) {
      transfer.items.add(new File([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], name, {type}));
    }
    const options = {bubbles: true, cancelable: true, dataTransfer: transfer, clipboardData: transfer};
    const event = kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
    return !document.querySelector(target).dispatchEvent(event);
"""
CONTENTS = "return panes[0].messages.filter((one) => one.role === 'user').map((one) => one.content)"
ARGUMENTS = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 100}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Iterator[RunningServer]:
    folder = str(save_vision_model("idefics3", tmp_path_factory.mktemp("seeing")))
    arguments = {**ARGUMENTS, "model": folder, "served_model_name": ["seeing"], "limit_mm_per_prompt": {"image": 3}}
    with start_in_background(arguments, timeout=240) as running:
        yield running


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    found = [folder / "one.png", folder / "two.jpg", folder / "three.webp"]
    for seed, path in enumerate(found):
        random_image(seed).resize((160, 90)).save(path)
    return found


def transferred(path: Path, kind: str = "image/png") -> list[str]:
    return [path.name, kind, base64.b64encode(path.read_bytes()).decode()]


@pytest.fixture
def page(browser, seeing) -> Iterator[Page]:
    opened = Page(browser, seeing.url)
    opened.run("for (const name of ['logprobs', 'field-max_tokens']) byId(name).value = name === 'logprobs' ? 0 : 4")
    yield opened
    opened.run("localStorage.clear()")


def thumbs(page: Page) -> list[str]:
    return [one.get_attribute("alt") for one in page.find("#images img")]


def test_images_are_seen_taken_back_sent_and_kept(page, pictures):
    page.one("#image-files").send_keys("\n".join(map(str, pictures[:2])))
    page.wait(lambda: thumbs(page) == ["one.png", "two.jpg"])
    assert page.run("return [...document.querySelectorAll('#images img')].every((one) => one.naturalWidth === 160)")
    page.one("#images button").click()
    assert thumbs(page) == ["two.jpg"]
    assert page.run("return document.activeElement.getAttribute('aria-label')") == "Remove two.jpg"
    assert page.run(TRANSFER, "drop", "main", [transferred(pictures[2], "image/webp")])
    page.wait(lambda: thumbs(page) == ["two.jpg", "three.webp"])
    page.send("What is this?")
    assert thumbs(page) == [] and not page.one("#images").is_displayed()
    [content] = page.run(CONTENTS)
    urls = [part["image_url"]["url"] for part in content[:-1]]
    assert [url.partition(",")[0] for url in urls] == ["data:image/jpeg;base64", "data:image/webp;base64"]
    assert base64.b64decode(urls[0].partition(",")[2]) == pictures[1].read_bytes()
    assert content[-1] == {"type": "text", "text": "What is this?"}
    assert not page.find(".error") and "answer" in page.text(".figures")
    assert [one.get_attribute("alt") for one in page.find(".turn.user img")] == ["two.jpg", "three.webp"]
    page.one("#retry").click()
    page.finish()
    assert page.run(CONTENTS) == [content] and len(page.find(".turn.user img")) == 2
    page.send("And now?")
    assert page.run(CONTENTS) == [content, "And now?"] and "image_url" in page.run("return program('curl')")
    stored = page.run("return JSON.stringify({...localStorage})")
    assert "What is this?" in stored and "base64" not in stored
    page.check()


def test_pasted_images_need_no_text_and_what_is_none_is_refused(page, pictures):
    assert page.run(TRANSFER, "paste", "#prompt", [transferred(pictures[0])])
    page.wait(lambda: thumbs(page) == ["one.png"])
    assert page.run(TRANSFER, "drop", "main", [["note.txt", "text/plain", "aGk="]])
    page.wait(lambda: "note.txt is no image" in page.text(".error"))
    page.send("")
    [content] = page.run(CONTENTS)
    assert [part["type"] for part in content] == ["image_url"] and "answer" in page.text(".figures")
    page.run(TRANSFER, "drop", "main", [["broken.png", "image/png", "aGk="]])
    page.wait(lambda: thumbs(page) == ["broken.png"])
    page.send("And this?")
    assert "no image in one of the formats" in page.text(".error")
    page.one("#mode-completion").click()
    assert not page.one("#add-image").is_displayed()
    assert not page.run(TRANSFER, "drop", "main", [transferred(pictures[0])])
    page.check(failures=1)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_keyboard_is_enough_and_there_are_no_barriers(page, pictures, theme):
    from selenium.webdriver.common.keys import Keys

    page.run("setTheme(arguments[0])", theme)
    page.one("#image-files").send_keys("\n".join(map(str, pictures)))
    page.wait(lambda: len(thumbs(page)) == 3)
    assert page.barriers() == []
    for left in (2, 1):
        page.find("#images button")[-1].send_keys(Keys.ENTER)
        assert len(thumbs(page)) == left
    page.one("#prompt").send_keys("See", Keys.ENTER)
    page.finish()
    assert page.barriers() == [] and len(page.find(".turn.user img")) == 1
    page.check()


def test_on_a_telephone(seeing, pictures):
    driver = open_browser()
    try:
        size = {"width": 420, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page = Page(driver, seeing.url)
        page.set("#field-max_tokens", "4")
        assert page.one("#add-image").is_displayed()
        page.one("#image-files").send_keys("\n".join(map(str, pictures)))
        page.wait(lambda: len(thumbs(page)) == 3)
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [420, 420]
        page.send("See")
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [420, 420]
        page.check()
    finally:
        driver.quit()


def test_a_model_of_text_is_offered_no_images(browser, server, pictures):
    page = Page(browser, server.url)
    assert not page.one("#add-image").is_displayed()
    assert not page.run(TRANSFER, "drop", "main", [transferred(pictures[0])]) and thumbs(page) == []
    page.check()
