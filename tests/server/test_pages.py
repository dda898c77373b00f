import json
import re
import urllib.error
import urllib.request

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families


def get(served, path):
    with urllib.request.urlopen(served.address + path, timeout=10) as answer:
        return answer.read().decode(), answer.headers


def status(served, path):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(served, path)
    return caught.value.code


def numbers(served):
    text, headers = get(served, "/metrics")
    assert headers["Content-Type"].startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_requests_and_tokens(served, fake):
    before = numbers(served)
    assert before["h2okv_max_num_seqs",] == 4 and before["h2okv_running",] == 0
    client = served.client()
    client.completions.create(model="fake", prompt="a b c", max_tokens=5)
    list(client.completions.create(model="fake", prompt="a b", max_tokens=5, stream=True))
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="fake", prompt="a b", temperature=-1)
    after = numbers(served)
    assert after["h2okv_requests_total", "/v1/completions", "ok"] == 2
    assert after["h2okv_requests_total", "/v1/completions", "refused"] == 1
    assert after["h2okv_new_tokens_total",] == 10 and after["h2okv_finished_total",] == 2
    assert after["h2okv_time_to_first_token_seconds_count",] == 2
    assert after["h2okv_time_per_token_seconds_count",] == 2
    assert after["h2okv_request_seconds_count", "/v1/completions"] == 3
    assert after["h2okv_tokens_per_second",] == 1.0  # ten in the last ten seconds
    for name in ("waiting", "cache_bytes", "full_bytes", "reserved_bytes", "healthy"):
        assert (f"h2okv_{name}",) in after
    for name in ("evictions", "prefix_hits", "reused_tokens", "prefix_evictions"):
        assert (f"h2okv_{name}_total",) in after
    assert after["h2okv_prefix_states",] == after["h2okv_prefix_bytes",] == 0


def test_servers_in_one_process_have_separate_metrics(served, serve, fake):
    other = serve(type(fake)(fake.tokenizer))
    other.client().completions.create(model="fake", prompt="a b c", max_tokens=5)
    assert ("h2okv_requests_total", "/v1/completions", "ok") not in numbers(served)


def test_health_and_stats(served, fake):
    assert json.loads(get(served, "/health")[0]) == {"status": "ok"}
    stats = json.loads(get(served, "/stats")[0])
    assert (stats["model"], stats["max_num_seqs"], stats["max_budget"]) == ("fake", 4, 400)
    fake.is_healthy = False
    assert status(served, "/health") == 503


def test_page_loads_nothing_from_other_sites(served):
    text, headers = get(served, "/")
    policy = headers["Content-Security-Policy"]
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", policy).group(1)
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert text.count(f'nonce="{nonce}"') == 2 and "@NONCE@" not in text
    assert not re.search(r"(src|href)=\"?(https?:)?//", text)
    assert " style=" not in text and not re.search(r"\son\w+=", text)
    again = get(served, "/")[1]["Content-Security-Policy"]
    assert again != policy
