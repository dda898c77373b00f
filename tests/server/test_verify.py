"""Figures of answers that are read again: in usage, /stats, /metrics and on the page."""

import json
import urllib.request

import openai
import pytest

import h2okv


@pytest.fixture(scope="module")
def served(start):
    options = {"heavy": 8, "recent": 8, "evict_every": 16, "prefix_cache": 1 << 24}
    engine = h2okv.AsyncLLM("bundled", max_prompt_tokens=512, verify=1.0, agreement=0.5, **options)
    served = start(engine, model_name="bundled")
    yield served
    served.stop()


VERIFY = {"extra_body": {"h2o": {"verify": True}}, "model": "bundled"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def figures_of(usage, tokens):
    (figures,) = usage.h2o["verified"]
    assert figures["tokens"] == tokens
    assert figures["agreement"] == figures["agreed"] / tokens
    assert (figures["first_difference"] is None) == (figures["agreed"] == tokens)
    return figures


def test_usage_has_the_figures_whole_and_streamed(served):
    client, options = served.client(), {"max_tokens": 40, "temperature": 0}
    text = {"prompt": "Once upon a time there was " * 4, **options, **VERIFY}
    figures = figures_of(client.completions.create(**text).usage, 40)
    assert figures["agreed"] < 40 and figures["kl_divergence"] > 0
    *chunks, last = client.completions.create(**text, **STREAM)
    assert figures_of(last.usage, 40) == figures
    assert [c.choices[0].finish_reason for c in chunks].count("length") == 1
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}], **options, **VERIFY}
    figures = figures_of(client.chat.completions.create(**chat).usage, 40)
    *_, last = client.chat.completions.create(**chat, **STREAM)
    assert figures_of(last.usage, 40) == figures
    reply = client.responses.create(
        input="Tell me a story.", max_output_tokens=40, temperature=0, **VERIFY
    )
    assert figures_of(reply.usage, 40) == figures
    several = client.completions.create(**{**text, "prompt": ["One day", "Two birds"]})
    assert [entry["tokens"] for entry in several.usage.h2o["verified"]] == [40, 40]


def test_a_repair_is_in_usage_and_counted(served, fetch, monkeypatch):
    monkeypatch.setattr("h2okv.engine.verify._TIE", 1.0)
    monkeypatch.setattr("h2okv.engine.verify._NATS", float("inf"))
    client, repair = served.client(), {"h2o": {"verify": "repair"}}
    text = {"prompt": "Once upon a time there was " * 4, "max_tokens": 40, "temperature": 0}
    text |= {"model": "bundled", "extra_body": repair}
    reply = client.completions.create(**text)
    figures = figures_of(reply.usage, 40)
    assert figures["repaired"] is True
    assert (figures["agreed"], figures["repair_tokens"]) == (40, 41)
    first, *_, last = client.completions.create(**text, **STREAM)
    assert first.choices[0].text == reply.choices[0].text  # in one piece, after the check
    assert figures_of(last.usage, 40) == figures
    assert json.loads(fetch("/stats"))["repaired"] == 2
    assert "h2okv_repaired_total 2.0" in fetch("/metrics")
    with pytest.raises(openai.BadRequestError, match=r"verify='repair': one answer is repaired"):
        client.completions.create(**text, n=2)


def test_without_the_field_usage_is_openais(served):
    reply = served.client().completions.create(model="bundled", prompt="A cat", max_tokens=2)
    assert "h2o" not in reply.usage.model_dump()


def test_stats_and_metrics_have_the_agreement_by_budget_and_kind(served, fetch):
    client, message = served.client(), {"role": "user", "content": "Say yes."}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}
    chat = {"model": "bundled", "messages": [message], "max_tokens": 8}
    client.chat.completions.create(**chat, tools=[TOOL])
    client.chat.completions.create(**chat, response_format=schema)
    client.chat.completions.create(**chat, extra_body={"h2o": "12"})
    while json.loads(fetch("/stats"))["verify_waiting"]:
        pass
    stats = json.loads(fetch("/stats"))
    report = stats["agreement"]
    kinds = {(row["budget"], row["kind"]) for row in report["rows"]}
    assert kinds >= {("16", "tools"), ("16", "schema"), ("12", "chat")}
    assert report["text"].startswith("on your traffic ") and report["goal"] == 0.5
    assert report["total"]["bound"] < report["total"]["agreement"] <= 1
    assert stats["verified"] >= 3
    assert 'h2okv_agreement_bound{budget="16",kind="schema"} ' in fetch("/metrics")


@pytest.fixture
def fetch(served):
    def read(path):
        with urllib.request.urlopen(f"{served.address}{path}", timeout=30) as reply:
            return reply.read().decode()

    return read


def test_a_wrong_value_is_one_sentence(served):
    message = r"h2o\.verify must be true, false, repair or repair_all, got 'yes'"
    with pytest.raises(openai.BadRequestError, match=message):
        served.client().completions.create(
            model="bundled", prompt="A cat", extra_body={"h2o": {"verify": "yes"}}
        )
