"""The page in a real Chromium: load, scrub, switch policy and head, compare, export."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from h2okv.budget import TokenBudget
from h2okv.config import CacheConfig
from h2okv_lab.analysis.attention_stats import of_layers
from h2okv_lab.analysis.eviction_trace import entries_after, follow
from h2okv_lab.analysis.viewer import Desk, PageServer, build_page

TEXT = "The hatter opened his eyes very wide on hearing this; but all he said was, why?\n" * 2
CHOICE = {
    "policies": ["full", "recent", "h2o", "heavy"], "budgets": ["20%", "10%"], "policy": "h2o",
    "beside": "", "other": "recent", "layer": 1, "head": 0, "new_tokens": 6, "text": TEXT,
}  # fmt: skip
READY = (
    "document.getElementById('viewer').hidden === false && !message()"
    " && view.panes[0].trace?.layerScores.has(view.layer)"
)
HELPERS = """
globalThis.message = () => document.getElementById('message').textContent;
globalThis.kept = (place) => view.panes[place].spans
  .map((span, i) => /\\bl\\d/.test(span.className) && !/leaving/.test(span.className) ? i : -1)
  .filter((i) => i >= 0);
globalThis.text = (id) => document.getElementById(id).textContent;
"""


@pytest.fixture(scope="module")
def reading(reader):
    return reader.read(TEXT, 6)


@pytest.fixture(scope="module")
def address(reader):
    server = PageServer(0, Desk(reader, CHOICE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(browser, address):
    browser.open(address)
    browser.run(HELPERS)
    browser.wait(READY)
    return browser


@pytest.fixture(scope="module")
def expected(model, reading):
    """Return a function for the entries of the library's cache on the same text."""

    def find(policy, step, layer, head, share=0.2):
        budget = CacheConfig(budget=share, min_tokens=0).budget.resolve(reading.length)
        trace = follow(model, reading.input_ids, policy, budget)
        return [int(i) for i in entries_after(trace.gone_at, step)[layer, head].nonzero()[0]]

    return find


def test_it_shows_what_the_cache_holds_while_scrubbing(page, reading, expected):
    assert page.run("view.panes[0].spans.map((s) => s.textContent).join('')") == "".join(
        reading.pieces
    )
    for step in (reading.length // 2, 60, 99, reading.length - 1):
        page.run(
            f"(() => {{ const s = document.getElementById('step'); s.value = {step};"
            "s.dispatchEvent(new Event('input')); })()"
        )
        page.wait(f"text('step-text').startsWith('Step {step + 1} of {reading.length}')")
        assert page.run("kept(0)") == expected("h2o", step, 1, 0)
    assert page.complaints() == []


def test_the_newest_token_stays_in_sight(page, reading):
    page.run("view.panes[0].tokens.style.maxHeight = '60px'")
    for key in ("End", "Home", "End"):
        page.press(key)
        inside = page.run(
            "(() => { const { tokens, spans } = view.panes[0];"
            "const box = tokens.getBoundingClientRect();"
            "const span = spans[view.step].getBoundingClientRect();"
            "return span.top >= box.top && span.bottom <= box.bottom; })()"
        )
        assert inside, key


def test_every_control_has_a_key(page, reading, expected):
    start = page.run("view.step")
    page.press("ArrowRight")
    assert page.run("view.step") == start + 1
    page.press("ArrowLeft", shift=True)
    assert page.run("view.step") == start - 19
    page.press("End")
    assert page.run("view.step") == reading.length - 1
    page.press("Home")
    assert page.run("view.step") == 0
    page.press("End")
    page.press("h")
    assert page.run("[view.layer, view.head]") == [1, 1]
    page.press("l", shift=True)
    assert page.run("document.getElementById('layer').value") == "0"
    assert page.run("kept(0)") == expected("h2o", reading.length - 1, 0, 1)
    page.press("p")
    page.wait("view.panes[0].trace.packed.policy === 'heavy'")
    assert page.run("kept(0)") == expected("heavy", reading.length - 1, 0, 1)
    page.press("Home")
    page.press(" ")
    page.wait("view.step >= 2")
    page.press(" ")
    assert page.run("view.timer") is None


def test_two_policies_side_by_side(page, reading, expected):
    page.press("End")
    page.press("b")
    page.wait("view.panes[1].trace?.layerScores.has(view.layer) && !message()")
    last = reading.length - 1
    assert page.run("document.querySelectorAll('.pane').length") == 2
    assert page.run("kept(0)") == expected("h2o", last, 1, 0)
    assert page.run("kept(1)") == expected("recent", last, 1, 0)
    page.run(
        "(() => { const b = view.panes[1].budget; b.value = '10%';"
        "b.dispatchEvent(new Event('change')); })()"
    )
    page.wait("view.panes[1].trace.packed.budget === '10%' && !message()")
    assert page.run("kept(1)") == expected("recent", last, 1, 0, share=0.1)


def test_a_tokens_place_to_leave_is_that_of_its_score(page):
    page.press("End")
    rows = page.run(
        "(() => { const { trace } = view.panes[0], { layer, head, step } = view;"
        "const gone = trace.goneAt(layer, head), score = trace.scorer(layer, head, step);"
        "return [...gone].map((at, i) => [at > step, score(i),"
        "trace.standing(layer, head, step, i)]); })()"
    )
    packed = page.run("view.panes[0].trace.packed")
    last = len(rows) - packed["recent"]
    ranked = [row[1] for row in rows[packed["sink"] : last] if row[0]]
    assert len(ranked) > 3
    for token, (is_kept, score, standing) in enumerate(rows):
        if not is_kept or not packed["sink"] <= token < last:
            assert standing is None
            continue
        assert standing["rank"] == 1 + sum(other < score for other in ranked)
        assert standing["count"] == len(ranked)
    token = next(token for token, row in enumerate(rows) if row[2])
    page.run(f"view.panes[0].inspect({token})")
    assert f"of {len(ranked)} to leave" in page.run("text('detail')")


def test_bytes_and_the_selected_token_are_described(page, reading):
    page.press("End")
    trace = reading.trace("h2o", "20%")
    cache_bytes = page.run("view.panes[0].trace.bytesAt(view.step)")
    assert cache_bytes == trace["bytes"][-1][1]
    assert page.run("view.panes[0].trace.fullBytesAt(view.step)") == trace["full_bytes"]
    assert "a full one" in page.run("document.querySelector('.bytes-text').textContent")
    page.run("view.panes[0].tokens.focus()")
    page.press("ArrowLeft")
    detail = page.run("text('detail')")
    assert detail.startswith(f"Token {reading.length}, ")
    assert "held to the end; 4 of 4 heads hold it" in detail
    page.press("ArrowUp")
    assert page.run("text('detail')").startswith(f"Token {reading.length - 10}, ")
    assert page.run("view.step") == reading.length - 1


def test_arrows_lead_to_a_token_s_strongest_queries(page, model, reading):
    page.press("End")
    page.run("view.setHead(1, 0).then(() => view.panes[0].inspect(4))")
    rows = {}

    def look(layer):
        if layer.layer_idx == 1:
            for first, probabilities in layer.rows():
                for index, received in enumerate(probabilities[0].sum(0)):
                    rows[first + index] = float(received[4]) if len(received) > 4 else 0.0

    of_layers(model, reading.input_ids, look)
    later = sorted((query for query in rows if query > 4), key=rows.get, reverse=True)
    strongest = [query for query in later[:3] if rows[query] > 0.01]
    assert strongest and page.run("view.readersOf(4)") == strongest
    assert page.run("document.querySelectorAll('.arrows svg > path').length") == len(strongest)
    assert f"({strongest[0] + 1})" in page.run("text('detail')")
    page.press("Home")
    assert page.run("document.querySelectorAll('.arrows').length") == 0


def test_scores_are_exact_where_they_were_recorded(page, reading):
    trace = follow(
        reading.reader.model, reading.input_ids, "h2o", TokenBudget(0, 16, 16), recorded=48
    )
    step = int(trace.recorded[-8])
    page.run(f"view.go({step})")
    shown = page.run(
        f"Array.from({{length: {step + 1}}}, (_, i) => view.panes[0].trace.scorer(1, 0, {step})(i))"
    )
    true = trace.scores[-8][1, 0]
    assert max(abs(a - b) / max(b, 0.05) for a, b in zip(shown, true, strict=True)) < 0.05


def test_an_error_message_for_a_bad_text_and_recovery(page):
    page.run("document.getElementById('text').value = 'x'; view.read()")
    page.wait("message().includes('got 1;')")
    page.run("document.getElementById('text').value = 'another text to look at, that is all'")
    page.run("document.getElementById('read').click()")
    page.wait("view.reading.tokens.length === 42 && !message()")
    page.wait("view.panes[0].trace.length === 42")


def test_loading_a_file_and_an_error_for_a_bad_budget(page, tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("a story from a file, long enough to be read")
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])
    page.wait("document.getElementById('text').value.startsWith('a story')")
    page.run("document.getElementById('read').click()")
    page.wait("view.reading.tokens.length === 49 && !message()")
    page.run(
        "(() => { const b = view.panes[0].budget; b.value = '140%';"
        "b.dispatchEvent(new Event('change')); })()"
    )
    page.wait("message().includes('budget 1.4 is out of range')")


def test_saving_a_picture(page, tmp_path):
    page.press("b")
    page.wait("view.panes[1].trace?.layerScores.has(view.layer) && !message()")
    # Where a picture is to be kept, say so in the environment.
    path = Path(os.environ.get("H2OKV_SCREENSHOT", tmp_path / "viewer.png"))
    page.screenshot(path)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 20


def test_everything_that_can_be_focused_has_a_name_and_a_mark(page):
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        node
        for node in tree
        if any(p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", []))
        and node["role"]["value"] not in ("RootWebArea", "option", "MenuListPopup")
    ]
    assert len(focusable) >= 12
    unnamed = [node for node in focusable if not node.get("name", {}).get("value")]
    assert unnamed == []
    page.run("view.panes[0].tokens.focus()")
    page.press("ArrowLeft")
    assert page.run("getComputedStyle(view.panes[0].tokens).outlineWidth") == "3px"


def luminance(colour):
    channels = [int(value) / 255 for value in colour.split("(")[1].rstrip(")").split(",")[:3]]
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_contrast_on_every_colour(page, dark):
    page.dark(dark)
    page.run("document.body.insertAdjacentHTML('beforeend', '<span id=probe></span>')")
    lights = []
    for level in range(1, 11):
        page.run(f"document.getElementById('probe').className = 'l{level}'")
        colours = page.run(
            "(({ color, backgroundColor }) => [color, backgroundColor])"
            "(getComputedStyle(document.getElementById('probe')))"
        )
        ink, paper = map(luminance, colours)
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, (level, colours)
        lights.append(paper)
    # Also evicted and future tokens, when stopped and while the page plays.
    for name in ("t gone", "t unread"):
        page.run(f"document.getElementById('probe').className = '{name}'")
        ink, paper, opacity, fading = page.run(
            "(({ color, opacity, transitionDuration }) => [color, getComputedStyle(document.body)"
            ".backgroundColor, opacity, transitionDuration])"
            "(getComputedStyle(document.getElementById('probe')))"
        )
        ink, paper = luminance(ink), luminance(paper)
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, name
        assert (opacity, fading) == ("1", "0s")
    # Brightness is monotonic: the scale is readable without colour.
    assert lights == sorted(lights, reverse=not dark)
    page.dark(False)


def test_an_export_works_alone(browser, page, reading, expected, tmp_path):
    traces = [reading.trace(policy, "20%") for policy in ("recent", "h2o")]
    choice = {**CHOICE, "policies": ["recent", "h2o"], "budgets": ["20%"], "text": ""}
    path = tmp_path / "kept.html"
    content = {"choice": choice, "reading": reading.content, "traces": traces}
    path.write_text(build_page(content), encoding="utf-8")
    browser.open(path.as_uri())
    browser.run(HELPERS)
    browser.wait(READY)
    browser.press("End")
    last = reading.length - 1
    assert browser.run("kept(0)") == expected("h2o", last, 1, 0)
    browser.press("b")
    browser.wait("view.panes[1].trace?.layerScores.has(view.layer) && !message()")
    assert browser.run("kept(1)") == expected("recent", last, 1, 0)
    assert browser.run("document.getElementById('input').hidden")
    assert browser.complaints() == []


def test_a_saved_page_works_alone(browser, page, tmp_path):
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.press("b")
    page.wait("view.panes[1].trace?.layerScores.has(view.layer) && !message()")
    page.press("End")
    before = page.run("JSON.stringify([view.reading.tokens, kept(0)])")
    page.run("document.getElementById('export').click()")
    path = tmp_path / "kept.html"
    for _ in range(200):
        page.run("new Promise((done) => setTimeout(done, 50))")
        if path.is_file():
            break
    browser.open(path.as_uri())
    browser.run(HELPERS)
    browser.wait(READY)
    browser.press("End")
    after = browser.run("JSON.stringify([view.reading.tokens, kept(0)])")
    assert json.loads(after) == json.loads(before)
    assert browser.complaints() == []


def test_the_map_of_all_heads_is_on_the_first_screen(page):
    box = page.run("(({ top, bottom }) => [top, bottom])"
                   "(document.querySelector('.map').getBoundingClientRect())")  # fmt: skip
    assert 0 <= box[0] < box[1] <= 1000
    assert box[1] <= page.run("document.querySelector('.tokens').getBoundingClientRect().top")


def test_a_phone_shows_what_the_page_is_for_and_no_controls_without_data(page):
    page.resize(390, 844)
    try:
        assert page.run("document.querySelector('header p').offsetHeight") > 0
        top = page.run("document.querySelector('.map').getBoundingClientRect().top")
        assert 0 <= top + page.run("scrollY") < 844
        page.run("document.getElementById('viewer').hidden = true")
        shown = "[...document.querySelectorAll('#viewer select, #viewer button')]"
        assert page.run(f"{shown}.filter((control) => control.offsetHeight).length") == 0
        assert page.run("document.documentElement.scrollWidth") <= 390
    finally:
        page.resize()
        page.run("document.getElementById('viewer').hidden = false")
