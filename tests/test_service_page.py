"""The page of a cache server in a real browser."""

import os
from contextlib import closing
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from test_keeper import A, B, known, learn, places
from test_service_admin import TOKEN, administered

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; `make browser` installs it")


@pytest.fixture
def browser(tmp_path):
    with closing(Browser(tmp_path / "profile")) as one:
        yield one


def button(title, document):
    return (
        f"[...document.querySelectorAll('#documents tr')].find(row => row.innerText.includes('{document}'))"
        f"?.querySelectorAll('button')[{['pin', 'remove'].index(title)}]"
    )


def test_the_page_shows_what_is_there_and_changes_it(browser, tmp_path):
    with administered(tmp_path, slots=64, token="", local_disk=tmp_path / "disk") as service:
        engine = service.engine()
        browser.open(service.url + "/")
        browser.eventually("document.getElementById('documents')?.innerText == 'No document is known yet.'")
        learn(engine, A, name="handbook.md\nintro.md")
        learn(engine, B, "t", name="<img src=x onerror=document.title='injected'>")
        engine.store.release(engine.store.pin(known(engine, A).keys))
        browser.eventually("document.getElementById('documents')?.innerText.includes('handbook.md (2 names)')")
        browser.eventually("document.getElementById('rate').innerText == '100.0 %'")
        text = browser.text()
        for shown in ("0.0 MiB", "of 0.5 MiB memory in use", "host", "disk", "<img src=x", "Pin"):
            assert shown in text
        assert browser.value("document.getElementById('clients-count').innerText") == "1"
        assert browser.value("document.querySelectorAll('#clients tr').length") == 2
        assert browser.value("document.querySelectorAll('img').length") == 0
        browser.value(f"{button('pin', 'handbook.md')}.click()")
        browser.eventually(f"{button('pin', 'handbook.md')}?.innerText == 'Unpin'")
        engine.keeper.refresh([known(engine, A)])
        assert known(engine, A).pinned
        browser.value(f"{button('remove', 'handbook.md')}.click()")
        browser.eventually("!document.getElementById('documents').innerText.includes('handbook.md')")
        assert places(engine, A) == [None] * 2
        assert browser.value("document.title") == "lmc cache server"
    browser.eventually("document.getElementById('state').innerText == 'the server does not answer'")


def test_the_page_asks_for_the_token_and_shows_nothing_before(browser, tmp_path):
    with administered(tmp_path) as service:
        learn(service.engine(), A, name="handbook.md")
        browser.open(service.url + "/")
        browser.eventually("document.getElementById('login')?.style.display == 'flex'")
        assert "handbook" not in browser.text()
        browser.value(f"document.getElementById('token').value = '{TOKEN}'")
        browser.value("document.getElementById('login').requestSubmit()")
        browser.eventually("document.getElementById('documents')?.innerText.includes('handbook.md')")
        if os.environ.get("LMC_SCREENSHOT"):
            browser.screenshot(Path(os.environ["LMC_SCREENSHOT"]))
