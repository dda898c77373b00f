"""What the page makes of a server that answers late, wrongly, in part or not at all."""

import json

import pytest
from server import page_driver
from server.page_driver import (
    IDLE,
    answers,
    ask,
    button,
    click,
    is_visible,
    proxied,
    questions,
    say,
    text,
    type_in,
    typed,
)

browser, page = page_driver.browser, page_driver.page

READ = """(async () => {
  const parts = %s.map((part) => new Uint8Array(part));
  const stream = new ReadableStream({
    start(control) { parts.forEach((part) => control.enqueue(part)); control.close(); },
  });
  const found = [];
  for await (const data of serverEvents(stream)) { found.push(data); }
  return found;
})()"""

STREAMS = [
    ("data: a\n\ndata: b\n\n", ["a", "b"]),
    ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
    ("data: a\r\rdata: b\r\r", ["a", "b"]),
    ("\ufeffdata:a\n\n\n\n: ping\n\n:\ndata:  b\n: pong\n\n", ["a", " b"]),
    ("data: one\ndata: two\r\ndata\ndata:\n\n", ["one\ntwo\n\n"]),
    ("event: x\nid: 7\nretry: 10\ndata: {\"a:b\": 1}\nother: c\nother\n\n", ['{"a:b": 1}']),
    ("event: only\n\ndata: ä€𝄞\n\n", ["ä€𝄞"]),
    ("data: a\n\ndata: not closed", ["a", "not closed"]),
    ("data: a\n\ndata: b\n", ["a", "b"]),
    ("", []),
]  # fmt: skip


def test_events_are_read_however_they_are_split(browser, page):
    page()
    for source, events in STREAMS:
        data = list(source.encode())
        cuts = [[data], [[byte] for byte in data]]
        cuts += [[data[:at], data[at:]] for at in range(1, len(data))]
        for cut in cuts:
            assert browser.run(READ % json.dumps(cut)) == events, (source, cut)


def event(content="", end=None, **more):
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": end}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


BEGIN = event("Part of ") + event("an answer")
DONE = b"data: [DONE]\n\n"
CUT = "Cut short. The stream ended before the answer did."


@pytest.mark.parametrize(
    ("stream", "note"),
    [
        ([BEGIN, event(end="stop"), DONE], ""), ([BEGIN, event(end="stop")], ""),
        ([BEGIN, DONE], ""), ([BEGIN, event(end="length"), DONE], "Ended by Max tokens."),
        ([BEGIN + event(end="stop"), b'data: {"choices": [], "usage": null}\n\n' + DONE], ""),
        ([b": ping\n\n", BEGIN.replace(b"\n", b"\r\n"), b":\r\n\r\n", DONE], ""), ([BEGIN], CUT),
        ([BEGIN[:-20], BEGIN[-20:] + event(" more")[:-9]], CUT), ([BEGIN, None], "Cut short."),
        ([BEGIN, b'data: {"error": {"message": "The engine has stopped."}}\n\n'],
         "Cut short. The engine has stopped."),
        ([BEGIN, b'data: {"error": "bad"}\n\n', DONE], "Cut short. bad"),
    ],
)  # fmt: skip
def test_incomplete_answer_is_marked(browser, page, stream, note):
    served = page()
    with proxied(browser, served) as proxy:
        browser.wait("stats")
        proxy.stream = stream
        ask(browser, "hello")
        assert answers(browser) == ["Part of an answer"]
        for _ in range(2):
            shown = text(browser, ".assistant .note")
            assert shown.startswith(note) and bool(shown) == bool(note)
            assert is_visible(browser, ".assistant .note") == bool(note)
            page_driver.reload(browser)
        assert questions(browser) == ["hello"] and typed(browser) == ""


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ([], "The stream ended before the answer did."),
        ([b"data: {\n\n"], "The stream ended before the answer did."),
        ([b"<html>a page</html>"], "The stream ended before the answer did."),
        ([event(end="stop"), DONE], "The model's answer is empty."),
        ([b"data: null\n\n", b"data: 7\n\n", b"data: {}\n\n"], "The stream ended before"),
        ([b'data: {"error": {}}\n\n'], "The server reports an error."),
    ],
)
def test_failed_request_restores_the_question_with_the_error(browser, page, stream, words):
    served = page()
    with proxied(browser, served) as proxy:
        browser.wait("stats")
        proxy.stream = stream
        say(browser, "hello")
        browser.wait(f"{IDLE} && document.getElementById('said').textContent")
        assert words in text(browser, "#said")
        assert typed(browser) == "hello" and questions(browser) == []
        assert browser.run("document.querySelectorAll('article').length") == 0


@pytest.mark.parametrize("key", ["a key", "schlüssel €"])
def test_missing_api_key_is_requested(browser, page, key):
    page(api_key=key)
    browser.wait("document.getElementById('key').checkVisibility()")
    assert "API key is missing" in text(browser, "#said")
    assert browser.run("document.activeElement.id") == "key"
    say(browser, "too early")
    browser.wait(f"{IDLE} && document.querySelectorAll('article').length === 0")
    assert "API key is missing" in text(browser, "#said") and typed(browser) == "too early"
    type_in(browser, "wrong", "key")
    browser.call(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=13
    )
    browser.wait("document.getElementById('said').textContent.includes('API key is wrong')")
    browser.run("document.getElementById('key').value = ''")
    type_in(browser, key, "key")
    button(browser, "Use")
    browser.run("document.activeElement.blur()")
    browser.wait("!document.getElementById('key').checkVisibility()")
    assert text(browser, "#said") == "" and text(browser, "#model") == "fake"
    page_driver.reload(browser)  # which forgets neither
    assert not is_visible(browser, "#key")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("Enter")
    browser.wait(f"{IDLE} && document.querySelector('.assistant')")
    assert questions(browser) == ["too early"] and answers(browser)[0]


@pytest.mark.parametrize("at", ["", "/"])
def test_page_below_a_path_with_or_without_slash(browser, page, fake, at):
    served = page()
    with proxied(browser, served, "/llm", at):
        browser.wait("stats")
        assert text(browser, "#said") == ""
        ask(browser, "hello")
        assert answers(browser)[0]
        assert browser.run("document.getElementById('view').href.endsWith('/llm/view')")
        page_driver.reload(browser)
        assert questions(browser) == ["hello"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ((404, b"<html>"), "There is no h2okv server at"),
        ((502, b"<html>"), "server behind it does not (HTTP 502)"),
        ((500, b"oops"), "HTTP 500"),
        ((403, b'{"error": {"message": "Not you."}}'), "Not you."),
        ((403, b'{"error": "Not you."}'), "Not you."),
        ((403, b'{"error": {"message": null}, "detail": []}'), "HTTP 403"),
        ((200, b"<html>log in"), "is not an h2okv server"),
        ((200, b"null"), "is not an h2okv server"),
        ((401, b"<html>"), "The API key is missing"),
    ],
)
def test_server_without_stats_is_reported(browser, page, status, words):
    served = page()
    with proxied(browser, served) as proxy:
        for question in ("hello", " again"):
            # At first the page knows nothing of the server, then it does.
            proxy.status = status
            browser.open("about:blank")
            browser.open(f"{proxy.address}/#chat-1")
            browser.wait("document.getElementById('said').textContent")
            assert words in text(browser, "#said")
            say(browser, question)
            browser.wait(IDLE)
            assert words in text(browser, "#said") and questions(browser) == []
            proxy.status = None
            click(browser, "#open-settings")  # which looks again
            browser.wait("stats && document.getElementById('said').textContent === ''")
        assert typed(browser) == "hello again"
        proxy.status = status
        browser.run("document.getElementById('settings').close()")
        say(browser, " and again")
        browser.wait(f"{IDLE} && document.getElementById('said').textContent")
        shown = text(browser, "body > footer")
        assert "properties of" not in shown and "null" not in shown
        assert typed(browser) == "hello again and again" and browser.run("stats.model") == "fake"


def test_lost_server_is_reported_and_reconnected(browser, page, fake, start):
    served = page()
    ask(browser, "first")
    served.stop()
    say(browser, "second")
    browser.wait(f"{IDLE} && document.getElementById('said').textContent")
    assert "does not answer" in text(browser, "#said") and typed(browser) == "second"
    fake.is_healthy = True
    another = start(fake, port=served.port, model_name="another")
    try:
        browser.wait("document.getElementById('said').textContent === ''")
        assert text(browser, "#model") == "another"
        browser.run("document.getElementById('prompt').focus()")
        browser.press("Enter")
        browser.wait(f"{IDLE} && document.querySelectorAll('.assistant').length === 2")
        assert questions(browser) == ["first", "second"]
    finally:
        another.stop()


def test_changed_model_of_the_server_is_used(browser, page, fake, start):
    served = page()
    served.stop()
    fake.is_healthy = True
    another = start(fake, port=served.port, model_name="another")
    try:
        ask(browser, "hello")
        assert answers(browser)[0] and text(browser, "#said") == ""
    finally:
        another.stop()
