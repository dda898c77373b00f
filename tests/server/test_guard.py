import contextlib
import http.client
import json
import re
import urllib.error
import urllib.request

import openai
import pytest

BODY = {"model": "fake", "prompt": "once upon a time", "max_tokens": 2}


def get(served, path, **headers):
    request = urllib.request.Request(served.address + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


@pytest.fixture
def locked(serve, fake):
    return serve(fake, api_key="a-long-secret")


@pytest.mark.parametrize("key", ["wrong", "a-long-secre", "a-long-secrets"])
def test_wrong_api_key_is_refused(locked, fake, key):
    with pytest.raises(openai.AuthenticationError, match="missing or wrong") as caught:
        locked.client(api_key=key).completions.create(**BODY)
    assert caught.value.body["code"] == "invalid_api_key"
    assert fake.requests == []


def test_api_key_outside_ascii(locked):
    connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=10)
    connection.request("GET", "/v1/models", headers={"Authorization": "Bearer \xff\xfe"})
    assert connection.getresponse().status == 401


def test_paths_with_and_without_api_key(locked):
    for path in ("/health", "/"):
        assert get(locked, path)[0] == 200
    for path in ("/metrics", "/stats", "/v1/models", "/nowhere"):
        code, body, headers = get(locked, path)
        assert code == 401 and headers["WWW-Authenticate"] == "Bearer"
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    for path in ("/metrics", "/stats", "/v1/models"):
        assert get(locked, path, Authorization="Bearer a-long-secret")[0] == 200
    assert get(locked, "/v1/models", Authorization="Basic a-long-secret")[0] == 401
    assert get(locked, "/v1/models", Host="a/health?")[0] == 401  # no path of the client's making


def test_foreign_host_names_are_refused_on_loopback(serve, fake):
    served = serve(fake)
    assert get(served, "/v1/models")[0] == 200
    assert get(served, "/v1/models", Host=f"localhost:{served.port}")[0] == 200
    assert get(served, "/v1/models", Host="[::1]:80")[0] == 200
    code, body, _ = get(served, "/v1/models", Host="evil.example")
    assert code == 403 and b"evil.example" in body
    for options in ({"api_key": "a-key"}, {"host": "0.0.0.0"}):
        served = serve(fake, **options)
        assert get(served, "/health", Host="evil.example")[0] == 200


@pytest.fixture
def tight(serve, fake):
    return serve(fake, max_body=1000)


def test_a_body_above_the_limit_is_not_read(tight, fake):
    connection = http.client.HTTPConnection("127.0.0.1", tight.port, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(50 << 20))
    connection.endheaders()
    answer = connection.getresponse()  # nothing of the body was sent
    assert answer.status == 413
    error = json.loads(answer.read())["error"]
    assert error["code"] == "body_too_large" and "more than 1000 bytes" in error["message"]


def test_client_reads_the_413_after_sending_50_mb(tight, fake):
    for body in ({**BODY, "prompt": "a" * (50 << 20)}, {**BODY, "prompt": "a" * 2000}):
        with pytest.raises(openai.APIStatusError) as caught:
            tight.client().completions.create(**body)
        assert caught.value.status_code == 413
    assert tight.client().completions.create(**BODY).usage.completion_tokens == 2
    assert len(fake.requests) == 1


def test_a_body_below_the_limit_is_read(serve, fake):
    served = serve(fake)
    with pytest.raises(openai.BadRequestError, match="got a text of 8000000 characters"):
        served.client().completions.create(**{**BODY, "prompt": "a" * 8_000_000})


def test_chunked_body_above_the_limit_is_refused(tight, fake):
    sent = 0

    def endless():
        nonlocal sent
        yield b'{"model": "fake", "prompt": "'
        while sent < 200 << 20:
            sent += 65536
            yield b"a" * 65536

    connection = http.client.HTTPConnection("127.0.0.1", tight.port, timeout=30)
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    # The server listens no longer than some seconds; then it hangs up.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", "/v1/completions", endless(), headers, encode_chunked=True)
    with contextlib.suppress(ConnectionResetError):
        assert connection.getresponse().status == 413
    connection.close()
    assert fake.requests == []
    assert tight.client().completions.create(**BODY).usage.completion_tokens == 2


def test_short_chunked_body(tight):
    connection = http.client.HTTPConnection("127.0.0.1", tight.port, timeout=10)
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    chunks = iter([json.dumps(BODY).encode()])
    connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()


def test_cors_origins(serve, fake):
    served = serve(fake, cors_origins=("https://chat.example",), api_key="a-key")
    asking = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    asking["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-os"
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    for origin, allowed in (("https://chat.example", True), ("https://evil.example", False)):
        connection.request("OPTIONS", "/v1/completions", headers={**asking, "Origin": origin})
        answer = connection.getresponse()
        answer.read()
        assert (answer.status == 200) is allowed
        assert (answer.headers["Access-Control-Allow-Origin"] == origin) is allowed
        # What is refused can be read by the page that may ask.
        code, _, headers = get(served, "/v1/models", Origin=origin)
        assert code == 401 and (headers["Access-Control-Allow-Origin"] == origin) is allowed
    connection.close()
    assert (
        get(serve(fake, cors_origins=("*",)), "/health", Origin="http://a")[2][
            "Access-Control-Allow-Origin"
        ]
        == "*"
    )
    assert get(serve(fake), "/health", Origin="http://a")[2]["Access-Control-Allow-Origin"] is None


def test_log_has_one_line_per_request_without_text(serve, fake, capfd):
    served = serve(fake, log_requests=True, api_key="a-key")
    client = served.client()
    client.completions.create(**BODY)
    list(client.completions.create(**BODY, stream=True))
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**BODY, temperature=-1)
    get(served, "/v1/models%0Aforged?key=1")
    served.stop()  # a line is written after its answer is sent
    lines = capfd.readouterr().err.splitlines()
    day = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127.0.0.1 "
    pattern = day + r"POST /v1/completions 200 \d+\.\d\d s ok [1-9]\d* prompt tokens, 2 new"
    assert [bool(re.fullmatch(pattern, line)) for line in lines] == [True, True, False, False], (
        lines
    )
    assert re.fullmatch(day + r"POST /v1/completions 400 .* s refused 0 prompt.*", lines[2])
    assert re.fullmatch(day + r"GET /v1/models%0Aforged 401 \d+\.\d\d s", lines[3])
    assert "once upon" not in "".join(lines)
