"""Chromium for tests, and a proxy that offers a server under a path."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import pytest

#: Where distributions put the program and its driver.
NAMES = (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",))


def open_browser(size: str = "1400,900") -> Any:
    """A headless Chromium, driven by Selenium. Skips the test where either is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install 'aiakq[test]'")
    program, driver = (next(filter(None, map(shutil.which, names)), None) for names in NAMES)
    if program is None or driver is None:
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"):
        options.add_argument(word)
    options.add_argument(f"--window-size={size}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


class Page:
    """The playground in a browser. Violations of its policy are counted from the first script on."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        browser.get("about:blank")  # the page before may ask a server that is gone until it is left
        browser.get_log("browser")
        browser.execute_cdp_cmd(
            "Page.addScriptToEvaluateOnNewDocument",
            {
                "source": "window.violations = []; document.addEventListener('securitypolicyviolation', "
                "(event) => window.violations.push(event.violatedDirective + ' ' + event.blockedURI));"
            },
        )
        browser.get(url)
        if self.find("#strip"):
            self.wait(lambda: self.find("#fields input") or not self.text("#strip").startswith("connecting"))

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """The text of all that ``selector`` finds, hidden or not."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent).join('')", selector
        )

    def run(self, script: str, *values: Any) -> Any:
        return self.browser.execute_script(script, *values)

    def set(self, selector: str, value: str) -> None:
        """Give a control a value as a person does."""
        self.run(
            "const [one, value] = arguments; one.value = value; one.dispatchEvent(new Event('change'))",
            self.one(selector),
            value,
        )

    def wait(self, holds: Callable[[], Any], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it did not come true in time:\n" + self.one("body").text
            time.sleep(0.05)

    def send(self, prompt: str, finish: bool = True) -> None:
        """Send ``prompt`` and wait until the answer ends."""
        self.set("#prompt", prompt)
        self.wait(lambda: self.one("#send").is_enabled())
        self.one("#send").click()
        if finish:
            self.finish()

    def finish(self) -> None:
        self.wait(lambda: self.one("#send").is_enabled())

    def barriers(self) -> list[str]:
        """What axe-core finds that keeps people out, from contrast to names and roles."""
        axe = pytest.importorskip("axe_core_python", reason="pip install 'aiakq[test]'")
        self.run(files(axe).joinpath("axe.min.js").read_text(encoding="utf-8") + "; window.axe = axe;")
        found = self.browser.execute_async_script(
            "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']})"
            ".then((result) => done(result.violations), (failure) => done([String(failure)]))"
        )
        return [f"{one['id']}: {one['nodes'][0]['html']}" if isinstance(one, dict) else one for one in found]

    @property
    def violations(self) -> list[str]:
        return self.run("return window.violations")

    def check(self, failures: int = 0) -> None:
        """Nothing violated the policy, no script failed, and ``failures`` requests did."""
        assert self.violations == []
        lines = [line for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]
        assert len(lines) == failures and all(line["source"] == "network" for line in lines), lines


@contextmanager
def proxy(target: str, prefix: str, hold_after: int | None = None) -> Iterator[str]:
    """A proxy that offers ``target`` under ``prefix`` and takes it away from the paths; gives its address.

    With ``hold_after``, the rest of a stream is held back after that many bytes, so that it cannot end by itself.
    """
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            if not self.path.startswith(prefix + "/"):
                self.send_error(404)
                return
            connection = HTTPConnection(target.removeprefix("http://"))
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection.request(self.command, self.path.removeprefix(prefix), body, dict(self.headers))
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection", "date"):
                    self.send_header(name, value)
            self.end_headers()
            left = hold_after if "event-stream" in answer.getheader("content-type", "") else None
            while data := answer.read1(1 << 16 if left is None else max(1, min(left, 1 << 16))):
                self.wfile.write(data)
                self.wfile.flush()
                if left is not None and (left := left - len(data)) <= 0:
                    closing.wait()
                    return

        do_GET = do_POST = forward

        def log_message(self, *values: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.daemon_threads = True
        yield f"http://127.0.0.1:{server.server_port}"
        closing.set()
        server.shutdown()
