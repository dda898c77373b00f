"""What the page remembers, whatever tabs, reloads, streams and full storages do."""

import json
import time

import pytest
from server import page_driver
from server.page_driver import (
    BUSY,
    IDLE,
    answers,
    ask,
    button,
    click,
    fill,
    is_visible,
    questions,
    reload,
    say,
    text,
    titles,
    type_in,
    typed,
)

from h2okv.engine.outputs import RequestFailedError

browser, page, tabs = page_driver.browser, page_driver.page, page_driver.tabs

FILL = """(() => {
  for (const size of [1e6, 1e4, 100, 1]) {
    try {
      for (let n = 0; n < 1000; n += 1) { localStorage.setItem(`${size}-${n}`, "x".repeat(size)); }
    } catch { /* full, for parts of this size */ }
  }
})()"""
EMPTY = """for (const key of Object.keys(localStorage)) {
  if (/^1/.test(key)) { delete localStorage[key]; }
}"""


def open_chat(browser, title):
    click(browser, "#open-chats")
    button(browser, title)


def test_tabs_keep_chats_of_other_tabs(browser, page, tabs):
    served = page()
    second = tabs.open(served.address)
    ask(browser, "from the second tab")
    tabs.go(tabs.first)
    ask(browser, "from the first tab")
    tabs.close(second)
    reload(browser)
    assert questions(browser) == ["from the first tab"] and len(answers(browser)) == 1
    assert titles(browser) == ["from the first tab", "from the second tab"]
    open_chat(browser, "from the second tab")
    assert questions(browser) == ["from the second tab"] and answers(browser)[0]


def test_chat_continued_in_two_tabs_has_both_turns(browser, page, tabs, fake):
    page()
    ask(browser, "begun")
    address = browser.run("location.href")
    fill(browser, "max_tokens", "40")
    second = tabs.open(address)
    assert questions(browser) == ["begun"]
    fake.pause = 0.03
    say(browser, "second tab")
    browser.wait(BUSY)
    tabs.go(tabs.first)
    say(browser, "first tab")  # both at once
    for tab in (second, tabs.first):
        tabs.go(tab)
        browser.wait(IDLE)
    for tab in (tabs.first, second):
        tabs.go(tab)
        browser.wait("document.querySelectorAll('.assistant').length === 3")
        for _ in range(2):
            assert sorted(questions(browser)) == ["begun", "first tab", "second tab"]
            assert all(len(answer) > 5 for answer in answers(browser))
            assert "another tab" not in text(browser, "#talk")
            reload(browser)
    # What is asked next goes on from both.
    fake.pause = 0
    fill(browser, "max_tokens", "12")
    ask(browser, "after both")
    read = fake.tokenizer.decode(list(fake.requests[-1][0]))
    assert "first tab" in read and "second tab" in read


def test_a_chat_deleted_in_one_tab_stays_deleted(browser, page, tabs, fake):
    page()
    ask(browser, "to be deleted")
    second = tabs.open(browser.run("location.href"))
    type_in(browser, "half a thou")
    tabs.go(tabs.first)
    click(browser, "#open-chats")
    button(browser, "Delete")
    tabs.go(second)
    browser.wait("!document.querySelector('article')")
    assert "deleted in another tab" in text(browser, "#said")
    assert typed(browser) == "half a thou"
    ask(browser, "ght")
    tabs.go(tabs.first)
    reload(browser)
    assert titles(browser) == ["half a thought"]


def test_deleting_the_open_chat_keeps_the_draft(browser, page):
    page()
    ask(browser, "to be deleted")
    type_in(browser, "not sent")
    for listed in (["to be deleted"], ["not sent"]):
        assert titles(browser) == listed
        assert typed(browser) == "not sent"
        click(browser, "#open-chats")
        button(browser, "Delete")
        browser.run("document.getElementById('chats').close()")
        assert questions(browser) == []
        reload(browser)
    assert typed(browser) == "" and titles(browser) == []


def test_deletion_stops_the_answer_in_another_tab(browser, page, tabs, fake):
    page()
    ask(browser, "to be deleted")
    fill(browser, "max_tokens", "1000")
    second = tabs.open(browser.run("location.href"))
    fake.pause = 0.03
    say(browser, "a long one")
    browser.wait("document.querySelectorAll('.assistant .said')[1]?.textContent.length > 9")
    tabs.go(tabs.first)
    browser.wait("document.querySelectorAll('.assistant').length === 2")  # seen while it comes
    click(browser, "#open-chats")
    button(browser, "Delete")
    tabs.go(second)
    browser.wait(IDLE)
    browser.wait("fetch('stats').then((one) => one.json()).then((one) => one.running === 0)")
    assert typed(browser) == "a long one" and answers(browser) == []
    reload(browser)
    assert typed(browser) == "a long one" and titles(browser) == ["a long one"]


def test_settings_of_two_tabs_are_both_kept(browser, page, tabs):
    served = page()
    second = tabs.open(served.address)
    click(browser, "#open-settings")
    type_in(browser, "Be a pirate.", "system")  # and the field is not left
    tabs.go(tabs.first)
    fill(browser, "temperature", "0.3")
    browser.wait("document.getElementById('system').value === 'Be a pirate.'")
    tabs.close(second)
    reload(browser)
    values = (
        "['system', 'temperature', 'max_tokens'].map((id) => document.getElementById(id).value)"
    )
    assert browser.run(values) == ["Be a pirate.", "0.3", "12"]


@pytest.mark.parametrize("end", ["reload", "close"])
def test_partial_answer_is_saved(browser, page, tabs, fake, end):
    served = page()
    fill(browser, "max_tokens", "1000")
    second = tabs.open(served.address)
    fake.pause = 0.02
    say(browser, "a b c")
    browser.wait("(document.querySelector('.assistant .said')?.textContent.length || 0) > 5")
    beginning, address = answers(browser)[0], browser.run("location.href")
    if end == "reload":
        reload(browser)
    else:
        tabs.close(second)
        tabs.open(address)
    assert questions(browser) == ["a b c"] and answers(browser)[0].startswith(beginning)
    assert "Cut short" in text(browser, ".assistant .note")
    fake.pause = 0
    fill(browser, "max_tokens", "3")
    button(browser, "Try again")
    browser.wait(f"{IDLE} && document.querySelectorAll('.assistant').length === 1")
    for _ in range(2):
        assert questions(browser) == ["a b c"] and len(answers(browser)) == 1
        assert "Cut short" not in text(browser, ".assistant .note")
        reload(browser)


def test_unanswered_question_survives_a_reload(browser, page, fake):
    fake.pause = 60
    page()
    say(browser, "never answered")
    browser.wait("true" if fake.requests else BUSY)
    reload(browser)
    assert questions(browser) == ["never answered"]
    assert "Cut short" in text(browser, ".assistant .note")


def test_failed_retry_keeps_the_earlier_answer(browser, page, fake):
    page()
    ask(browser, "one")
    answer = answers(browser)
    fake.is_healthy = False
    for _ in range(2):
        button(browser, "Try again")
        browser.wait(f"{IDLE} && document.getElementById('said').textContent")
        assert answers(browser) == answer and typed(browser) == ""
    reload(browser)
    assert answers(browser) == answer


def test_drafts_are_saved_by_chat_and_tab(browser, page, tabs):
    served = page()
    type_in(browser, "not sent")
    reload(browser)
    assert typed(browser) == "not sent"
    say(browser, ", now sent")
    browser.wait(f"{IDLE} && document.querySelector('.assistant')")
    address = browser.run("location.href")
    type_in(browser, "first's")
    second = tabs.open(address)
    browser.run("document.getElementById('prompt').value = ''")
    type_in(browser, "second's")
    third = tabs.open(served.address)  # which is another chat
    assert typed(browser) == ""
    type_in(browser, "third's")
    tabs.close(third)
    for tab, draft in ((second, "second's"), (tabs.first, "first's")):
        tabs.go(tab)
        assert typed(browser) == draft
        reload(browser)
        assert typed(browser) == draft
    # A closed tab's are found in the list, and by the next that begins with nothing.
    button(browser, "New chat")
    assert typed(browser) == ""
    assert titles(browser) == ["third's", "not sent, now sent"]
    tabs.open(served.address)
    assert typed(browser) == "third's"
    open_chat(browser, "not sent, now sent")
    assert typed(browser) in ("first's", "second's")
    button(browser, "Explain how a rainbow forms, step by step.")  # hidden, but there
    browser.wait(IDLE)
    assert typed(browser) in ("first's", "second's")


def test_a_sent_question_leaves_no_draft(browser, page):
    page()
    ask(browser, "sent")
    button(browser, "New chat")
    reload(browser)
    assert typed(browser) == "" and questions(browser) == []
    assert titles(browser) == ["sent"]


def test_edit_keeps_the_chat_and_the_draft(browser, page):
    page()
    ask(browser, "first")
    ask(browser, "second")
    type_in(browser, "third, not sent")
    button(browser, "Edit", 0)
    assert typed(browser) == "first" and questions(browser) == []
    reload(browser)
    assert typed(browser) == "first" and questions(browser) == []
    button(browser, "Cancel")
    assert typed(browser) == "third, not sent" and questions(browser) == ["first", "second"]
    button(browser, "Edit", 1)
    assert questions(browser) == ["first"]
    ask(browser, " again")
    assert questions(browser) == ["first", "second again"] and len(answers(browser)) == 2
    browser.run("history.back()")
    browser.wait("document.querySelectorAll('.user')[1].textContent.includes('second')")
    assert questions(browser) == ["first", "second"] and typed(browser) == "third, not sent"
    assert titles(browser) == ["first", "first"]


def test_failed_question_keeps_the_newer_draft(browser, page, fake):
    page()
    ask(browser, "fine")
    fake.failing, fake.is_held = {0: RequestFailedError("out of luck")}, True
    say(browser, "fails")
    browser.wait(f"{BUSY} && !document.getElementById('prompt').value")
    type_in(browser, "the next")
    fake.is_held = False
    browser.wait(f"{IDLE} && document.getElementById('said').textContent")
    assert typed(browser) == "the next" and questions(browser) == ["fine", "fails"]
    assert "No answer." in browser.run("[...document.querySelectorAll('.note')].at(-1).textContent")
    reload(browser)
    assert typed(browser) == "the next" and questions(browser) == ["fine", "fails"]
    fake.failing = {}
    button(browser, "Try again")
    browser.wait(f"{IDLE} && document.querySelectorAll('.assistant .said')[1].textContent")
    assert questions(browser) == ["fine", "fails"]


def test_full_storage_is_reported_with_a_remedy(browser, page, tmp_path):
    page()
    ask(browser, "an old one")
    button(browser, "New chat")
    browser.run(FILL)
    assert not is_visible(browser, "#full")
    ask(browser, "a new one " + "long " * 100)
    new = answers(browser)
    browser.wait("document.getElementById('full').checkVisibility()")
    assert "storage for this page is full" in text(browser, "#full")
    page_driver.call_whole_browser(
        browser, "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path)
    )
    button(browser, "Download this chat")
    file = tmp_path / "chat.md"
    browser.wait(f"{IDLE}")
    deadline = time.monotonic() + 10
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    content = file.read_text()
    assert "a new one long long" in content and new[0].split()[0] in content
    assert "an old one" not in content
    # A reload loses nothing.
    reload(browser)
    assert questions(browser)[0].startswith("a new one") and answers(browser) == new
    assert is_visible(browser, "#full")
    browser.run(EMPTY)
    button(browser, "Delete old chats")
    button(browser, "Delete")
    browser.run("document.getElementById('chats').close()")
    assert not is_visible(browser, "#full")
    browser.run("sessionStorage.clear()")
    reload(browser)
    assert answers(browser) == new and not is_visible(browser, "#full")
    assert len(titles(browser)) == 1 and browser.complaints() == []


def test_browser_without_storage_is_reported(browser, page):
    served = page()
    source = """for (const name of ["localStorage", "sessionStorage"]) {
      const get = () => { throw new DOMException("no", "SecurityError"); };
      Object.defineProperty(window, name, { get });
    }"""
    blocked = browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"]
    try:
        browser.open(served.address)
        browser.wait("stats")
        ask(browser, "forgotten")
        assert "keeps nothing" in text(browser, "#full") and is_visible(browser, "#full")
        button(browser, "New chat")
        assert titles(browser) == ["forgotten"]
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=blocked)


def test_chats_of_an_earlier_version_are_read(browser, page):
    served = page()
    chats = [
        {"id": 1764000000000 - n, "messages": [
            {"role": "user", "content": f"q{n}"},
            {"role": "assistant", "content": f"a{n}", "note": "x"},
            {"role": "user", "content": "more"}, {"role": "assistant", "content": "still"}]}
        for n in range(60)
    ]  # fmt: skip
    earlier = {"h2okv-chats": chats, "h2okv-settings": {"system": "Old.", "colours": False}}
    browser.run(
        "localStorage.clear();"
        f"for (const [key, value] of Object.entries({json.dumps(earlier)}))"
        " { localStorage.setItem(key, JSON.stringify(value)); }"
    )
    browser.open(served.address)
    browser.wait("stats")
    assert titles(browser) == [f"q{n}" for n in range(60)]
    open_chat(browser, "q7")
    assert questions(browser) == ["q7", "more"] and answers(browser) == ["a7", "still"]
    assert browser.run("[settings.system, settings.colours]") == ["Old.", False]
    assert browser.run("localStorage.getItem('h2okv-chats')") is None


def test_invalid_records_are_ignored(browser, page):
    page()
    ask(browser, "good")
    broken = [
        "", "{", "null", "7", "[]", "{}", '{"question": 3}', '{"question": "x", "answer": {}}',
    ]  # fmt: skip
    for name in ("turn/1/1", "turn/x", "turn/", "draft/1/1", "setting/system", "setting/colours"):
        for record in broken:
            browser.run(f"localStorage.setItem('h2okv/{name}', {json.dumps(record)})")
            reload(browser)
            assert questions(browser) == ["good"]
    for record in broken:
        browser.run(
            "for (const key of ['h2okv-chats', 'h2okv-settings'])"
            f" {{ localStorage.setItem(key, {json.dumps(record)}); }}"
        )
        reload(browser)
    assert titles(browser) == ["good"]
    assert browser.complaints() == []


def test_browser_back_during_an_answer_keeps_it_in_its_chat(browser, page, fake):
    page()
    ask(browser, "first chat")
    button(browser, "New chat")
    fill(browser, "max_tokens", "1000")
    fake.pause = 0.02
    say(browser, "second chat")
    browser.wait("(document.querySelector('.assistant .said')?.textContent.length || 0) > 5")
    beginning = answers(browser)[0]
    browser.run("history.back()")
    browser.wait(f"{IDLE} && document.querySelector('.user .said').textContent === 'first chat'")
    assert typed(browser) == ""
    browser.run("history.forward()")
    browser.wait("document.querySelector('.user .said').textContent === 'second chat'")
    assert answers(browser)[0].startswith(beginning)
    assert text(browser, ".assistant .note").startswith("Stopped.")
    assert titles(browser) == ["second chat", "first chat"]


def test_answer_retried_in_another_tab_is_not_duplicated(browser, page, tabs, fake):
    page()
    fill(browser, "max_tokens", "1000")
    second = tabs.open(browser.run("location.href"))
    fake.pause = 0.03
    say(browser, "one question")
    browser.wait("(document.querySelector('.assistant .said')?.textContent.length || 0) > 5")
    tabs.go(tabs.first)
    browser.wait("(document.querySelector('.assistant .said')?.textContent.length || 0) > 5")
    fill(browser, "max_tokens", "5")
    button(browser, "Try again")
    browser.wait(
        f"{IDLE} && !document.querySelector('.assistant .note').textContent.includes('another')"
    )
    for tab in (second, tabs.first):
        tabs.go(tab)
        browser.wait(IDLE)
        assert questions(browser) == ["one question"] and len(answers(browser)) == 1
        assert typed(browser) == "" and text(browser, "#said") == ""
