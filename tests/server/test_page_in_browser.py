"""The server's page in a real Chromium."""

import importlib.util
from pathlib import Path

_FILE = Path(__file__).parents[1] / "analysis" / "viewer" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("viewer_browser", _FILE)
_VIEWER = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_VIEWER)
browser = _VIEWER.browser  # the fixture


def text(browser, name):
    return browser.run(f"document.getElementById('{name}').textContent")


def fill(browser, name, value):
    browser.run(f"document.getElementById('{name}').value = {value!r}")


def click(browser, name):
    browser.run(f"document.getElementById('{name}').click()")


FINISHED = "!document.getElementById('go').disabled"


def test_numbers_and_a_prompt_with_its_answer(browser, serve, fake, bundled_tokenizer):
    served = serve(fake)
    browser.open(served.address)
    browser.wait("document.getElementById('numbers').children.length > 0")
    assert text(browser, "model") == "fake" and "0 of 4" in text(browser, "numbers")
    for chat in (False, True):
        browser.run(f"document.getElementById('chat').checked = {str(chat).lower()}")
        fill(browser, "prompt", "a bright <b>day</b>")
        fill(browser, "tokens", "5")
        click(browser, "go")
        browser.wait(f"{FINISHED} && document.getElementById('took').textContent")
        tokens, params, _ = fake.asked[-1]
        expected = "".join(bundled_tokenizer.decode([token]) for token in tokens[1:6])
        assert text(browser, "answer") == (expected.lstrip() if chat else expected)
        assert params.temperature == 0 and "5 written" in text(browser, "took")
    assert browser.run("getComputedStyle(document.body).maxWidth") != "none"  # the style applies
    assert browser.complaints() == []


def test_stop_ends_a_request(browser, serve, fake):
    fake.pause = 0.02
    served = serve(fake)
    browser.open(served.address)
    fill(browser, "tokens", "1000")
    click(browser, "go")
    browser.wait("document.getElementById('answer').textContent.length > 5")
    click(browser, "stop")
    browser.wait(FINISHED)
    assert text(browser, "said") == ""
    browser.wait("document.getElementById('numbers').textContent.includes('0 of 4')")
    assert fake.counts["aborted"] == 1


def test_errors_and_a_key(browser, serve, fake):
    served = serve(fake, api_key="a-key")
    browser.open(served.address)
    browser.wait("document.getElementById('limits').textContent.includes('asks for a key')")
    fill(browser, "key", "a-key")
    fill(browser, "tokens", "5000")
    click(browser, "go")
    browser.wait("document.getElementById('said').textContent")
    assert "max_tokens=5000 is more than this server writes" in text(browser, "said")
    fill(browser, "tokens", "3")
    click(browser, "go")
    browser.wait(f"{FINISHED} && document.getElementById('took').textContent")
    assert "3 written" in text(browser, "took") and text(browser, "said") == ""
