"""A headless Chromium for tests, driven over the pipes of its debugging protocol."""

import base64
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 60.0


class Browser:
    """One page in a browser of its own."""

    def __init__(self, folder):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={folder}", "--window-size=1180,860", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._asked, self._received, self._session = 0, b"", None
        page = next(one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]

    def open(self, url):
        self._ask("Page.navigate", url=url)

    def value(self, expression):
        """What a JavaScript expression is in the page; None if it fails."""
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def eventually(self, expression):
        until = time.monotonic() + SECONDS
        while not self.value(expression):
            assert time.monotonic() < until, f"{expression} does not come true; the page says\n{self.text()}"
            time.sleep(0.02)

    def text(self):
        return self.value("document.body.innerText") or ""

    def screenshot(self, file):
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)

    def _ask(self, method, **arguments):
        self._asked += 1
        question = {"id": self._asked, "method": method, "params": arguments}
        question |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(question).encode() + b"\0")
        while (answer := self._next()).get("id") != self._asked:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._received:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)
