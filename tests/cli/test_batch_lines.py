"""`h2okv batch`: lines of requests, OpenAI's among them, and the exit code."""

import json

import pytest

import h2okv

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "the cat"}
BEGUN = [USER, {"role": "assistant", "content": "sat on"}]


def line(name, url, **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


@pytest.fixture
def run(h2okv_command, model_folder, tmp_path):
    """Return a function that runs lines on the tiny model: outcome and results by id."""

    def call(*lines, options=(), output="out.jsonl"):
        source, results = tmp_path / "in.jsonl", tmp_path / output
        source.write_text("\n".join(map(json.dumps, lines)))
        files = ("--input", source, "--output", results, "--max-new-tokens", 4)
        cache = ("--policy", "h2o", "--budget", 16)
        outcome = h2okv_command("batch", "--model", model_folder, *cache, *files, *options)
        records = results.read_text().splitlines() if results.exists() else []
        parsed = map(json.loads, records)
        return outcome, {record.get("custom_id", record["id"]): record for record in parsed}

    return call


@pytest.fixture(scope="module")
def llm(model_folder):
    with h2okv.LLM(str(model_folder), heavy=8, recent=8, max_num_seqs=2) as engine:
        yield engine


def test_lines_for_another_model_are_refused(run, model_folder):
    named = {"messages": [USER], "max_tokens": 1}
    outcome, results = run(line("a", CHAT, **named), line("b", CHAT, model="gpt", **named))
    assert outcome.code == 2 and not results
    assert f"model='gpt' is not this command's model; give '{model_folder.name}'" in outcome.err
    outcome, results = run(
        line("a", CHAT, model=model_folder.name, **named),
        line("b", CHAT, model=str(model_folder), **named),
    )
    assert outcome.code == 0 and len(results) == 2


def test_openai_lines_get_openai_responses(run, llm):
    drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    outcome, results = run(
        line("a", CHAT, messages=BEGUN, max_tokens=6),
        line("b", TEXT, prompt="the dog", max_completion_tokens=None, **drawn),
        line("c", CHAT, messages=[]),
        line("d", TEXT, prompt=[5, 6, 7], max_tokens=3),
        {"id": 5, "prompt": "the dog", "max_tokens": 9, "top_k": 3, **drawn},
        {"prompt": "the log"},
    )
    assert outcome.code == 1 and "6 prompts, 1 with an error record" in outcome.err
    assert "26 new tokens" in outcome.err
    chat, text = results["a"]["response"]["body"], results["b"]["response"]["body"]
    assert set(results["a"]) == {"id", "custom_id", "response", "error"}
    assert results["a"]["error"] is None and results["a"]["response"]["status_code"] == 200
    assert chat["object"] == "chat.completion" and text["object"] == "text_completion"
    assert chat["usage"]["completion_tokens"] == 6
    # As the engine of `h2okv serve` answers the same requests.
    greedy = h2okv.SamplingParams(temperature=0, max_tokens=6)
    (answer,) = llm.chat(BEGUN, greedy)
    message = chat["choices"][0]["message"]
    assert message == {"role": "assistant", "content": answer.text}
    assert chat["usage"]["prompt_tokens"] == len(answer.prompt.token_ids)
    params = h2okv.SamplingParams(max_tokens=4, **drawn)
    assert text["choices"][0]["text"] == llm.generate("the dog", params)[0].text
    assert text["choices"][0]["finish_reason"] == "length"
    params = h2okv.SamplingParams(max_tokens=9, top_k=3, **drawn)
    assert results[5]["text"] == llm.generate("the dog", params)[0].text
    assert results["d"]["response"]["body"]["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
    }  # fmt: skip
    assert results[6]["new_tokens"] == 4
    refused = results["c"]
    assert refused["response"]["status_code"] == 400 and "is empty" in refused["error"]["message"]
    assert refused["response"]["body"]["error"]["param"] == "messages"


def test_a_job_of_openai_lines_resumes(run):
    lines = [line("a", TEXT, prompt="the cat"), line("b", TEXT, prompt="the cat")]
    outcome, first = run(lines[0])
    assert outcome.code == 0
    outcome, both = run(*lines, options=["--json"])
    assert outcome.code == 0 and json.loads(outcome.out)["skipped"] == 1
    assert both["a"] == first["a"] and set(both) == {"a", "b"}
    outcome, _ = run(line("a", TEXT, prompt="the cat", max_tokens=2), lines[1])
    assert outcome.code == 2 and 'a result for another prompt with id "a"' in outcome.err


def test_stop_strings_of_a_line_and_of_the_job(run, llm):
    greedy = h2okv.SamplingParams(temperature=0, max_tokens=12)
    full_text = llm.generate("the cat", greedy)[0].text
    stop = full_text[len(full_text) // 2 :][:2]
    body = {"prompt": "the cat", "max_tokens": 12}
    _, results = run(line("a", TEXT, stop=[stop], **body), line("b", TEXT, **body))
    choice = results["a"]["response"]["body"]["choices"][0]
    assert (
        choice["text"] == full_text[: full_text.index(stop)] and choice["finish_reason"] == "stop"
    )
    assert results["b"]["response"]["body"]["choices"][0]["text"] == full_text
    _, results = run({"id": 1, **body, "stop": stop}, options=["--raw"], output="other.jsonl")
    assert results[1]["text"] == full_text[: full_text.index(stop)]
    assert results[1]["finish_reason"] == "stop"


def test_unknown_fields_are_refused_before_the_model_is_read(h2okv_command, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b", "extra": 1}\n')
    model = tmp_path / "no-model"  # a folder that can be a model's, until it is looked at
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    files = ("--input", source, "--output", tmp_path / "out.jsonl")
    outcome = h2okv_command("batch", "--model", model, *files)
    assert outcome.code == 2 and "line 2 of " in outcome.err
    assert "extra is not known; leave it out" in outcome.err
    assert not (tmp_path / "out.jsonl").exists()


def test_exit_code_is_1_if_a_result_is_an_error(run):
    outcome, results = run({"prompt": " "}, {"prompt": None})
    assert outcome.code == 1 and "2 with an error record" in outcome.err
    assert all("error" in record for record in results.values())
    # Also when all is there already.
    assert run({"prompt": " "}, {"prompt": None})[0].code == 1
    assert run({"prompt": "the cat"}, output="fine.jsonl")[0].code == 0
