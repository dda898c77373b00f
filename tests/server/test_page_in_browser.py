"""The server's page in a real Chromium."""

import json
import re

import pytest
from server import page_driver
from server.page_driver import IDLE, answers, ask, button, click, fill, proxied, say, text
from server.test_page_stream import DONE, event

browser, page = page_driver.browser, page_driver.page  # the fixtures

HELD = """(() => {
  const found = {};
  for (const [name, highlight] of CSS.highlights) {
    found[name] = [...highlight].map((range) =>
      range.startContainer.data.slice(range.startOffset, range.endOffset));
  }
  return found;
})()"""


def test_conversation_is_sent_with_its_history(browser, page, fake):
    page()
    assert browser.run("document.activeElement.id") == "prompt"
    fill(browser, "system", "Be brief.")
    fill(browser, "temperature", "0")
    say(browser, "a bright <b>day</b>")
    browser.wait(IDLE)
    assert text(browser, ".user .said") == "a bright <b>day</b>"
    assert fake.requests[-1][1].temperature == 0 and fake.requests[-1][1].max_tokens == 12
    say(browser, "and a night")
    browser.wait(f"{IDLE} && document.querySelectorAll('.assistant').length === 2")
    read = fake.tokenizer.decode(list(fake.requests[-1][0]), skip_special_tokens=True)
    first = answers(browser)[0]
    assert read.startswith("Be brief.") and "day</b>\n\nAssistant: " in read
    assert first.split()[0] in read and read.index("and a night") > read.index("bright")
    # The page remembers it, and goes on from an earlier place.
    page_driver.reload(browser)
    assert answers(browser)[0] == first and len(answers(browser)) == 2
    button(browser, "New chat")
    assert answers(browser) == []
    click(browser, "#open-chats")
    assert browser.run("document.querySelector('#chats').matches(':modal')")
    button(browser, "a bright <b>day</b>")
    assert answers(browser)[0] == first and len(answers(browser)) == 2
    button(browser, "Edit")
    assert browser.run("document.getElementById('prompt').value") == "and a night"
    assert len(answers(browser)) == 1
    button(browser, "New chat")
    assert answers(browser) == [] and not browser.run("document.getElementById('welcome').hidden")
    click(browser, "#open-chats")
    button(browser, "Delete")
    assert text(browser, "#list") == ""
    assert browser.complaints() == []


def test_colors_and_counts_of_kept_tokens(browser, page, fake):
    page()
    say(browser, "one two three four five six seven eight")
    browser.wait(IDLE)
    assert "KV memory" in text(browser, ".assistant .note")
    assert "a full cache would be" in text(browser, ".assistant .note")
    spans = browser.run(HELD)
    assert set(spans) == {f"kept-{level}" for level in range(5)}
    message = "one two three four five six seven eight"
    assert all("".join(texts) for texts in spans.values())
    assert all(
        span_text in message + answers(browser)[0]
        for texts in spans.values()
        for span_text in texts
    )
    legend = text(browser, "#levels")
    totals = list(map(int, re.findall(r"\d+", legend)))
    assert legend.startswith("all ") and text(browser, "#heads") == "4"
    assert sum(totals) == len(fake.requests[-1][0]) + 11  # the newest is not in the cache yet
    colour = "getComputedStyle(document.querySelector('.said'), '::highlight(kept-4)')"
    light = browser.run(f"{colour}.backgroundColor")
    browser.dark(True)
    assert browser.run(f"{colour}.backgroundColor") != light
    browser.dark(False)
    say(browser, "nine")
    browser.wait(f"{IDLE} && document.querySelectorAll('.assistant').length === 2")
    pressed = "[...document.querySelectorAll('[aria-pressed]')].map((one) => one.ariaPressed)"
    assert browser.run(pressed) == ["false", "true"]
    button(browser, "Colours of this answer", 0)
    assert browser.run(pressed) == ["true", "false"]
    click(browser, "#colours")
    assert browser.run("document.getElementById('legend').hidden")
    assert not any(browser.run(HELD).values())
    assert browser.complaints() == []


DROP = """(async (name, content) => {
  const data = new DataTransfer();
  data.items.add(new File([content], name, { type: "text/plain" }));
  for (const kind of ["dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true }));
  }
  await new Promise((done) => setTimeout(done, 100));
})"""


def drop(browser, name, content):
    browser.run(f"{DROP}({json.dumps(name)}, {content if '[' in content else json.dumps(content)})")


def test_a_dropped_document_is_asked_about_and_says_what_is_kept(browser, page, fake):
    page()
    drop(browser, "notes.txt", "the tide comes in at noon and goes out at night\n")
    assert text(browser, "#document-name") == "notes.txt, 47 characters"
    page_driver.reload(browser)  # the draft keeps it
    assert text(browser, "#document-name") == "notes.txt, 47 characters"
    say(browser, "when does it come in?")
    browser.wait(IDLE)
    read = fake.tokenizer.decode(list(fake.requests[-1][0]), skip_special_tokens=True)
    assert "out at night" in read and read.index("at night") < read.index("when does it")
    assert browser.run("document.getElementById('document').hidden")
    summary = text(browser, ".document summary")
    assert re.fullmatch(r"notes\.txt · 47 characters · the cache holds [\d.]+ % of it", summary)
    assert text(browser, ".document div").endswith("goes out at night")
    assert page_driver.titles(browser) == ["notes.txt: when does it come in?"]
    page_driver.reload(browser)
    assert text(browser, ".document summary") == "notes.txt · 47 characters"
    button(browser, "Edit")
    assert browser.run("document.getElementById('prompt').value") == "when does it come in?"
    assert text(browser, "#document-name") == "notes.txt, 47 characters"
    button(browser, "Remove")
    assert not page_driver.is_visible(browser, "#document")
    assert browser.complaints() == []


def test_a_document_that_is_not_text_is_refused(browser, page):
    page()
    for content, words in (
        ("new Uint8Array([255, 254, 0])", "a.bin is not a text file in UTF-8."),
        ("", "a.bin is empty."),
    ):
        drop(browser, "a.bin", content)
        browser.wait(f"document.getElementById('said').textContent === {words!r}")
        assert not page_driver.is_visible(browser, "#document")


def test_stop_button_ends_the_request_and_keeps_the_text(browser, page, fake):
    fake.pause = 0.02
    page()
    fill(browser, "max_tokens", "1000")
    say(browser, "a b c")
    browser.wait("(document.querySelector('.assistant .said')?.textContent.length || 0) > 5")
    assert browser.run("document.querySelector('#talk').ariaBusy") == "true"
    browser.run("document.activeElement.blur()")
    browser.press("Escape")
    browser.wait(IDLE)
    assert text(browser, "#status") == "Stopped." and text(browser, "#said") == ""
    assert len(answers(browser)[0]) > 5
    browser.wait("fetch('stats').then((one) => one.json()).then((one) => one.running === 0)")
    assert fake.counts["aborted"] == 1
    button(browser, "Try again")
    browser.wait("!document.getElementById('stop').hidden")
    browser.wait("fetch('stats').then((one) => one.json()).then((one) => one.running === 1)")
    click(browser, "#stop")
    browser.wait(IDLE)
    assert len(fake.requests) == 2


def test_errors_api_key_and_budget_in_the_page(browser, page, fake):
    page(api_key="a-key")
    browser.wait("document.getElementById('said').textContent.includes('API key is missing')")
    fill(browser, "key", "a-key")
    browser.wait("document.getElementById('said').textContent === ''")
    fill(browser, "max_tokens", "5000")
    say(browser, "hello")
    browser.wait("document.getElementById('said').textContent")
    assert "max_tokens=5000 is more than this server writes" in text(browser, "#said")
    # What was asked is in the box again, and not in the conversation.
    assert browser.run("document.getElementById('prompt').value") == "hello"
    assert browser.run("document.querySelectorAll('article').length") == 0
    fill(browser, "max_tokens", "3")
    fill(browser, "budget", "21")
    browser.wait(IDLE)
    browser.run("document.getElementById('prompt').value = ''")
    say(browser, "hello again")
    browser.wait(f"{IDLE} && document.querySelector('.assistant')")
    assert text(browser, "#said") == ""
    assert (fake.requests[-1][2].heavy, fake.requests[-1][2].recent) == (10, 11)


def test_settings_show_the_server_and_close_with_escape(browser, page):
    page()
    button(browser, "Settings")
    browser.wait("document.getElementById('numbers').textContent.includes('0 of 4')")
    assert browser.run("document.activeElement.textContent") == "Close"
    assert "at most 400" in text(browser, "#limits")
    for kind in ("rawKeyDown", "keyUp"):  # with its code, for it is the browser that closes it
        browser.call("Input.dispatchKeyEvent", type=kind, key="Escape", windowsVirtualKeyCode=27)
    browser.wait("!document.querySelector('dialog[open]')")


def test_every_field_has_a_name_and_nothing_is_wider_than_a_phone(browser, page):
    page()
    say(browser, "`" + "a_very_long_word" * 12 + "`")
    browser.wait(IDLE)
    nameless = browser.run(
        "[...document.querySelectorAll('input, textarea')]"
        ".filter((one) => !one.labels.length).map((one) => one.id)"
    )
    assert nameless == []
    size = {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    try:
        for opened in ("", "#open-settings", "#open-chats"):
            if opened:
                click(browser, opened)
            assert browser.run("document.documentElement.scrollWidth") == 360
            browser.run("document.querySelector('dialog[open]')?.close()")
        bottom = browser.run("document.getElementById('go').getBoundingClientRect().bottom")
        assert bottom <= 700
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


SAMPLES = [
    ("a *b* **c** `d *e*`", "<p>a <em>b</em> <strong>c</strong> <code>d *e*</code></p>"),
    ("***a*** 2 * 3 * 4 b_c_d", "<p><strong><em>a</em></strong> 2 * 3 * 4 b_c_d</p>"),
    (r"\*a\* ~~b~~ <b onclick='x'>&amp;", "<p>*a* <del>b</del> &lt;b onclick='x'&gt;&amp;amp;</p>"),
    ("# One\ntwo\nthree", "<h4>One</h4><p>two<br>three</p>"),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("2. d\n3. **e**\n\nf", '<ol start="2"><li>d</li><li><strong>e</strong></li></ol><p>f</p>'),
    ("```\na = 1\n\n# b\n```\nc", "<pre><code>a = 1\n\n# b</code></pre><p>c</p>"),
    ("```py\nif a == 1:  # b 'c'\n    'd\\'e' + f1",
     '<pre><code><span class="keyword">if</span> a == <span class="number">1</span>:  '
     """<span class="comment"># b 'c'</span>\n    <span class="string">'d\\'e'</span> + f1"""
     "</code></pre>"),
    ("```js\n/* a\nb */ `c",
     '<pre><code><span class="comment">/* a\nb */</span> '
     '<span class="string">`c</span></code></pre>'),
    ("```\nnot yet closed", "<pre><code>not yet closed</code></pre>"),
    ("> a\n> b\n\n---", "<blockquote><p>a<br>b</p></blockquote><hr>"),
    ("| a | b | c |\n|:--|:-:|--:|\n| 1 | *2* |",
     '<table><thead><tr><th>a</th><th class="center">b</th><th class="right">c</th></tr></thead>'
     '<tbody><tr><td>1</td><td class="center"><em>2</em></td></tr></tbody></table>'),
    ("[a](https://x.org/b_(c)) https://y.org.",
     '<p><a href="https://x.org/b_(c)">a</a> <a href="https://y.org">https://y.org</a>.</p>'),
    ("[a](javascript:alert(1)) ![b](data:text/html,x)", "<p><a>a</a> <a>b</a></p>"),
    ("* " * 300 + "**" * 300 + "[" * 300 + "`" * 301, None),
]  # fmt: skip


def test_markdown_is_shown_safely_and_knows_its_source(browser, page):
    page()
    for source, html in SAMPLES:
        shown, is_true = browser.run(
            f"""(() => {{
              const target = document.createElement("div"), source = {json.dumps(source)};
              renderMarkdown(target, source);
              const own = [...leaves(target)];
              return [target.innerHTML,
                own.every((one) => source.slice(one.at, one.at + one.length) === one.data)];
            }})()"""
        )
        away = ' target="_blank" rel="noopener noreferrer"'
        assert shown.count("<a href") == shown.count(away)
        assert html is None or shown.replace(away, "") == html
        # A text over several lines has its line ends from the source, so it is found there too.
        assert is_true, source
    grown = browser.run(
        """(() => {
          const target = document.createElement("div");
          renderMarkdown(target, "one\\n\\ntwo");
          const first = target.firstChild;
          renderMarkdown(target, "one\\n\\ntwo **three**");
          return [target.firstChild === first, target.children.length, target.innerHTML];
        })()"""
    )
    assert grown == [True, 2, "<p>one</p><p>two <strong>three</strong></p>"]


WHOLE_ANSWERS = {
    "quotes": ">" * 3000 + " deep",
    "quotes with spaces": "> " * 3000 + "deep",
    "lists in a line": "* " * 3000 + "deep",
    "lists in lines": "\n".join("  " * level + "- deep" for level in range(600)),
    "both in turn": "> 1. " * 3000 + "deep",
    "emphasis": "*" * 6000 + "deep" + "*" * 6000,
    "emphasis in turn": "**~~_" * 2000 + "deep" + "_~~**" * 2000,
    "paragraphs": "deep\n\n" * 60_000,
    "columns": "|deep" * 3000 + "|\n" + "|-" * 3000 + "|\n" + "|b" * 3000 + "|",
}


@pytest.mark.parametrize("answer", WHOLE_ANSWERS.values(), ids=list(WHOLE_ANSWERS))
def test_no_answer_ends_the_chat(browser, page, answer):
    served = page()
    with proxied(browser, served) as proxy:
        browser.wait("stats")
        proxy.stream = [event(answer) + event(end="stop") + DONE]
        ask(browser, "write")
        assert "deep" in answers(browser)[0] and text(browser, "#status") == ""
        proxy.stream = [event("more") + event(end="stop") + DONE]
        ask(browser, "and then?")
        page_driver.reload(browser)
        assert len(answers(browser)) == 2 and "deep" in answers(browser)[0]
        assert not browser.run("document.getElementById('new').disabled")
        button(browser, "New chat")
        assert answers(browser) == [] and browser.complaints() == []


LONG_TEXTS = [
    "'**a '.repeat(n / 4)", "'__a '.repeat(n / 4)", "'~~a '.repeat(n / 4)",
    "'*a '.repeat(n / 3) + 'x*'", "'*'.repeat(n / 2) + 'a' + '*'.repeat(n / 2)", "'['.repeat(n)",
    "'['.repeat(n) + '](x'", "'![a]('.repeat(n / 5)",
    "Array.from({ length: 1400 }, (_, k) => '`'.repeat(k + 1)).join(' ')",
    "'# ' + '#'.repeat(n) + 'x'", "'# a' + ' '.repeat(n) + '#x'", "'a|b\\n' + ' '.repeat(n) + 'x'",
    "'a|b\\n' + '|-'.repeat(n / 2) + 'x'", "'```' + ' '.repeat(n) + '`'", "'~'.repeat(n) + '`'",
    "'a|b\\n|-|-|\\n' + '|' + '\\\\|'.repeat(n / 2)", "'```py\\n\"' + 'a'.repeat(n)",
    "'http://'.repeat(n / 7)", "'- '.repeat(n / 2) + 'x'", "'> - '.repeat(n / 4)",
    "'> a\\n'.repeat(n / 4)", "'a\\n\\n'.repeat(n / 3)", "'- a\\n1. b\\n'.repeat(n / 9)",
    "'\\\\*'.repeat(n / 2)", "'\\ud800'.repeat(n)",
]  # fmt: skip


@pytest.mark.parametrize("script", LONG_TEXTS)
def test_a_million_characters_are_drawn_in_time(browser, page, script):
    """A pattern that reads on from each mark to the end would take hours."""
    page()
    size, shown, num_texts = browser.run(
        f"""(() => {{
          const n = 1e6, message = {{ role: "assistant", content: {script} }};
          article(message);
          showText(message);
          const body = bodies.get(message);
          bodies.delete(message);
          return [message.content.length, body.textContent.length, [...leaves(body)].length];
        }})()"""
    )
    assert size > 900_000 and shown > 0 and num_texts <= 50_000


def test_a_message_that_cannot_be_drawn_is_shown_as_written(browser, page):
    served = page()
    with proxied(browser, served) as proxy:
        browser.wait("stats")
        browser.run(
            "window.drawMarkdown = renderMarkdown;"
            "renderMarkdown = (target, source) => {"
            " if (source.includes('boom')) { throw new Error('cannot'); }"
            " drawMarkdown(target, source); }"
        )
        for answer in ("*first*", "*boom*\nsecond", "*third*"):
            proxy.stream = [event(answer[:3]), event(answer[3:]) + event(end="stop") + DONE]
            ask(browser, "write")
        assert answers(browser) == ["first", "*boom*\nsecond", "third"]
        browser.run("paintKept = () => { throw new Error('no colours'); }")
        proxy.stream = None
        ask(browser, "with colours")
        assert len(answers(browser)) == 4 and text(browser, "#status") == ""
        assert browser.complaints() == []


def test_deep_lists_fit_a_phone(browser, page):
    page()
    say(browser, "a")
    browser.wait(IDLE)
    size = {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    try:
        browser.run("chat.turns[0].answer.content = '> - '.repeat(9) + 'words of text'; showAll()")
        assert answers(browser)[0].endswith("words of text")
        assert browser.run("document.documentElement.scrollWidth") == 360
        width = "[...document.querySelectorAll('.assistant .said *')].at(-1).clientWidth"
        assert browser.run(width) > 80
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_code_is_copied_and_a_refused_link_does_not_look_like_one(browser, page):
    page()
    say(browser, "```\na = 1\n``` [x](javascript:alert(1)) [y](https://y.org)")
    browser.wait(IDLE)
    content = "```py\\na = 1\\nb = 2\\n```\\n[x](javascript:alert(1)) [y](https://y.org)"
    browser.run(f"chat.turns[0].answer.content = '{content}'; showAll(); showAll()")
    assert answers(browser) == ["a = 1\nb = 2x y"]  # without the button's word
    browser.run(
        "Object.defineProperty(navigator, 'clipboard',"
        " { value: { writeText: async (words) => { window.clip = words; } } })"
    )
    click(browser, "[aria-label='Copy the code']")
    assert browser.run("clip") == "a = 1\nb = 2" and text(browser, "#status") == "Copied."
    colours = (
        "[...document.querySelectorAll('.said, .said a')].map((one) => getComputedStyle(one).color)"
    )
    _, plain, refused, link = browser.run(colours)
    assert refused == plain != link
    assert text(browser, ".assistant h3") == "fake"
