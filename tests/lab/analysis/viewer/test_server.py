import http.client
import json
import socket
import struct
import threading
import time

import pytest

from h2okv_lab.analysis.viewer import HOST, Desk, PageServer, build_page, export_content

TEXT = "some words and some more words"
CHOICE = {"policies": ["h2o", "recent"], "budgets": ["20%"], "policy": "h2o", "text": "</script>"}


@pytest.fixture(scope="module")
def port(reader):
    server = PageServer(0, Desk(reader, CHOICE))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def ask(port, method, path, body=None, host=None):
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    headers = {} if host is None else {"Host": host}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.getheaders(), answer.read().decode()


def read(port, text, new_tokens=0):
    body = json.dumps({"text": text, "new_tokens": new_tokens})
    status, _, answer = ask(port, "POST", "/api/text", body)
    return status, json.loads(answer)


def test_the_page_is_complete_and_has_security_headers(port):
    status, headers, page = ask(port, "GET", "/")
    assert status == 200
    assert "default-src 'none'" in dict(headers)["Content-Security-Policy"]
    assert page == build_page({"choice": CHOICE})
    assert "http://" not in page and "https://" not in page
    assert page.count("</script>") == 2


def test_a_text_and_its_trace(port):
    status, reading = read(port, "some words and some more words", new_tokens=4)
    assert status == 200
    assert len(reading["tokens"]) == 34 and reading["given"] == 30
    assert (reading["layers"], reading["heads"]) == ([0, 1], 2)
    status, _, answer = ask(port, "GET", f"/api/trace?text={reading['id']}&policy=h2o&budget=20%25")
    trace = json.loads(answer)
    assert status == 200
    assert (trace["heavy"], trace["recent"], len(trace["next"])) == (3, 3, 34)
    again = ask(port, "GET", f"/api/trace?text={reading['id']}&policy=h2o&budget=20%25")[2]
    assert again == answer


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("text=999&policy=h2o&budget=20%25", "not in memory any more"),
        ("text=ID&policy=h3o&budget=20%25", "did you mean h2o"),
        ("text=ID&policy=h2o&budget=0.0", "above 0"),
        ("text=ID&policy=h2o&budget=nan", "is not a budget"),
        ("policy=h2o", "needs text, policy and budget"),
    ],
)
def test_a_bad_trace_is_a_sentence(port, query, sentence):
    _, reading = read(port, "some words and some more words")
    status, _, answer = ask(port, "GET", "/api/trace?" + query.replace("ID", str(reading["id"])))
    assert status == 400
    assert sentence in json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("text", "new_tokens", "sentence"),
    [("  ", 0, "text is empty"), ("short", 0, "got 5;"), ("long enough a text", 299, "0 to 292"),
     (7, 0, "the request needs")],
)  # fmt: skip
def test_a_bad_text_is_a_sentence(port, text, new_tokens, sentence):
    status, answer = read(port, text, new_tokens)
    assert status == 400
    assert sentence in answer["error"]


def test_a_broken_request_is_a_sentence(port):
    assert ask(port, "POST", "/api/text", "{")[0] == 400
    assert ask(port, "POST", "/api/text", "[]")[0] == 400
    assert ask(port, "POST", "/api/text")[0] == 400
    assert ask(port, "GET", "/etc/passwd")[0] == 404
    assert ask(port, "POST", "/")[0] == 404


def test_a_page_that_is_closed_too_early_is_no_error(port, capfd):
    for _ in range(3):
        with socket.create_connection((HOST, port)) as client:
            # Closed with a reset: the response cannot be sent.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert ask(port, "GET", "/")[0] == 200
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_another_hosts_name_is_refused(port):
    assert ask(port, "GET", "/", host="evil.example:80")[0] == 403
    assert ask(port, "GET", "/", host=f"localhost:{port}")[0] == 200


def test_a_taken_port_is_refused(reader):
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        number = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {number} cannot be opened .* --port 0"):
            PageServer(number, Desk(reader, CHOICE))
    with pytest.raises(ValueError, match="--port 99999"):
        PageServer(99999, Desk(reader, CHOICE))


def test_an_export_has_every_policy_and_budget_and_one_full_cache(reader):
    choice = {"policies": ["h2o", "full"], "budgets": ["50%", "6"], "text": TEXT, "new_tokens": 0}
    reports = []
    content = export_content(reader, choice, lambda label, done: reports.append((label, done)))
    runs = [(trace["policy"], trace["budget"]) for trace in content["traces"]]
    assert runs == [("h2o", "50%"), ("h2o", "6"), ("full", "50%")]
    assert list(dict.fromkeys(label for label, _ in reports)) == ["h2o 50%", "h2o 6", "full"]
    done = [fraction for _, fraction in reports]
    assert done == sorted(done) and done[0] == 0 and done[-1] < 1


def test_a_full_cache_is_traced_once_for_all_budgets(port):
    _, reading = read(port, TEXT)
    answers = [
        ask(port, "GET", f"/api/trace?text={reading['id']}&policy=full&budget={budget}")[2]
        for budget in ("20%25", "10")
    ]
    assert answers[0] == answers[1]


def test_the_page_explains_itself_and_shows_the_map_first():
    page = build_page({"choice": CHOICE})
    assert "every token as a column" in page
    assert page.index('class="map"') < page.index('class="tokens"')
