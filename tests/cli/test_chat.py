"""`h2okv chat` in a pipe: input, output and errors."""

import io
import os
import re
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cli.chat import converse, plan_cache
from h2okv.config import CacheConfig

BUDGET = ("--policy", "h2o", "--budget", "16+16", "--max-new-tokens", "12")
EMPTY = "there is nothing in the cache yet; send a message first.\n"


@pytest.fixture
def chat(h2okv_command, monkeypatch, chat_folder):
    def call(text, *args, model=chat_folder, budget=BUDGET):
        if "full" in args:  # which takes no budget
            budget = ("--max-new-tokens", "12")
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return h2okv_command("chat", "--model", model, *budget, *args)

    return call


def statuses(outcome):
    return [line for line in outcome.err.splitlines() if " tokens seen, " in line]


def remarks(outcome):
    return [line for line in outcome.err.splitlines() if " tokens seen, " not in line]


def test_lines_and_blocks_of_a_pipe_are_messages(chat):
    outcome = chat('the cat\n\n"""\nthe dog\n/quit\n"""\nthe mat\n')
    assert outcome.code == 0
    assert len(statuses(outcome)) == 3
    assert remarks(outcome) == []
    for prompt in ("> ", "... ", "tokens/s"):
        assert prompt not in outcome.out
    assert chat("/quit\nthe cat\n").out == ""


def test_status_line_shows_tokens_memory_and_speed(chat):
    outcome = chat("the cat\n" * 4)
    seen = [int(line.split()[0].replace(",", "")) for line in statuses(outcome)]
    assert seen == sorted(set(seen))
    last = statuses(outcome)[-1]
    assert re.search(r"tokens seen, 3\d kept \| KV cache ", last) and ", a full one " in last
    assert " tokens/s | first after " in last
    assert last.endswith("cut at --max-new-tokens 12")


def test_answers_are_read_again_with_the_full_cache(chat):
    outcome = chat("the cat\n" * 20, "--verify")  # beyond the context window
    lines = re.findall(r"^(\d+) of (\d+) next tokens are.*", outcome.err, re.MULTILINE)
    assert 2 < len(lines) < 20 and lines[0][1] == "12" and 0 < int(lines[0][0]) <= 12
    note = "compared 0 of 12 tokens: there is room for a full cache of 256 tokens"
    assert sum(line.startswith(note) for line in outcome.err.splitlines()) > 2


def test_a_chat_continues_beyond_the_context_window(chat):
    outcome = chat("the dog sat on the log? " + "a heron, a fox; 7 owls? " * 3 + "\n" + "9\n" * 12)
    assert outcome.code == 0
    assert len(statuses(outcome)) == 13
    assert int(statuses(outcome)[-1].split()[0]) > 256
    assert re.search(r" tokens seen, 3\d kept \| ", statuses(outcome)[-1])


def test_original_positions_end_at_the_context_window_and_keep_the_chat(chat):
    lines = "abcdefghijklmnopqrstuvwxyz0123456789\n" * 6 + "/cache\n/reset\nthe cat\n"
    outcome = chat(lines, "--cache", "positions=original")
    assert outcome.code == 0
    refusals = [line for line in remarks(outcome) if "context of 256" in line]
    assert refusals and all("--cache positions=rolling" in line for line in refusals)
    assert "[-evicted-]: " in outcome.out
    assert outcome.err.splitlines()[-2] == "a new chat"


def test_failed_commands_do_not_change_the_chat(chat, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    lines = [
        "/cache", "/save", "/save x", "/load", "the cat", "/nope", "/cahce", "/cache 7",
        "/cache 1 5", "/cache one", "/cache 1 1 1", f"/load {tmp_path}/none",
        f"/save {tmp_path}/none/x", f"/save {tmp_path}/notes.txt", "/ hello", "the dog",
    ]  # fmt: skip
    outcome = chat("\n".join(lines))
    words = [
        "nothing in the cache yet", "/save needs a file", "nothing to save yet",
        "/load needs a file", "'/nope' is not a command; /help", "did you mean /cache",
        "one of [0, 1], got 7", "KV heads 0 to 1", "'one' is not a number", "has too many words",
        "is not a file", "cannot be written", "is not a saved chat", "'/' is not a command",
    ]  # fmt: skip
    assert outcome.code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    for remark, word in zip(remarks(outcome), words, strict=True):
        assert word in remark
        assert remark.endswith(".")
    assert outcome.out == chat("the cat\nthe dog\n").out


def test_help_lists_the_commands_and_shows_an_example(chat, h2okv_command):
    out = chat("/help\n").out
    for command in ("/cache", "/save", "/load", "/reset", "/help", "/quit", "Ctrl-C"):
        assert command in out
    assert "h2okv chat --model ./my-model" in h2okv_command("chat", "--help").out


def test_reset_begins_a_new_chat(chat):
    twice = chat("the cat\n/reset\nthe cat\n/reset\n/cache\n")
    answer = chat("the cat\n").out
    assert twice.out == answer * 2
    assert twice.err.endswith(EMPTY)


def test_undo_and_retry(chat):
    plain = chat("the cat\n/undo\nthe dog\n/retry\n/undo\n/undo\n")
    dog = chat("the dog\n").out
    assert plain.out == chat("the cat\n").out + dog * 2
    taken_back, again, none = remarks(plain)
    assert taken_back == again == "the last turn is taken back"
    assert none.startswith("no earlier turn is kept")


@pytest.mark.parametrize(
    ("window", "options", "expected"),
    [
        (1024, {}, 256), (1024, {"policy": "best"}, 256), (512, {}, 100),
        (1024, {"evict_every": 64}, 256), (1024, {"policy": "full"}, None),
    ],
)  # fmt: skip
def test_it_evicts_where_a_server_does(window, options, expected):
    config = LlamaConfig(max_position_embeddings=window, num_attention_heads=2, head_dim=16)
    cache = CacheConfig(**({"heavy": 200, "recent": 200} | options))
    assert plan_cache(config, cache, "auto")[0].evict_every == expected
    assert plan_cache(config, cache, "auto", 0)[0].evict_every is None
    if expected:
        assert plan_cache(config, cache, "auto", 64)[0].evict_every == 64


def test_cache_shows_kept_and_evicted_tokens(chat):
    outcome = chat("the cat sat on the mat\nthe dog?\nand?\n/cache\n/cache 0\n/cache 1 0\n")
    shown = outcome.out.split("kept by all: ")[1:]
    assert len(shown) == 3
    for text in shown:
        assert "[-evicted-]: " in text
    # One head keeps a token or it does not: as many as the budget says, and a span of 8.
    assert 32 <= int(shown[2].split()[0]) < 40
    assert "{some:" not in shown[2]


def test_a_line_that_is_not_utf8_is_refused_and_the_next_is_answered(chat):
    outcome = chat(b"caf\xe9\nthe cat\n")
    assert "the line is not UTF-8 text" in remarks(outcome)[0]
    assert len(statuses(outcome)) == 1


@pytest.mark.slow
def test_a_saved_chat_continues_in_another_process(chat, chat_folder, tmp_path):
    file = tmp_path / "evening.chat"
    answers = chat("the cat\nthe dog\nthe mat\n", "--system", "be brief").out
    first = chat(f"the cat\nthe dog\n/save {file}\n", "--system", "be brief").out
    command = (sys.executable, "-m", "h2okv", "chat", "--model", str(chat_folder), *BUDGET)
    process = subprocess.run(
        (*command, "--load", str(file), "--temperature", "0"),
        input=b"the mat\n",
        capture_output=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert (first + process.stdout.decode()) == answers
    assert b"2 turns, " in process.stderr
    loaded = chat(f"/load {file}\nthe mat\n", "--seed", "3")
    assert first + loaded.out == answers
    after_reset = chat(f"/load {file}\n/reset\nthe cat\n").out
    assert after_reset == chat("the cat\n", "--system", "be brief").out != chat("the cat\n").out
    # Saving over a saved chat is what saving is for.
    assert "saved to" in chat(f"the cat\n/save {file}\n").err


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def spoil_note(file, old, new):
    data = file.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    file.write_bytes(data.replace(old, new))


def forget_chat(file):
    save_file(load_file(file), file)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (cut, "damaged"),
        (forget_chat, "no H2OCache"),
        (lambda file: file.write_text("hello"), "damaged"),
        (lambda file: spoil_note(file, b"token_ids", b"token_idz"), "damaged"),
        (lambda file: spoil_note(file, b"transcript", b"transcrapt"), "damaged"),
    ],
)
def test_a_damaged_file_is_refused_and_the_chat_continues(chat, tmp_path, spoil, word):
    file = tmp_path / "evening.chat"
    chat(f"the dog\n/save {file}\n")
    spoil(file)
    outcome = chat(f"the cat\n/load {file}\nthe dog\n")
    (remark,) = remarks(outcome)
    assert word in remark and str(file) in remark
    assert outcome.out == chat("the cat\nthe dog\n").out
    failed = chat("the cat\n", "--load", file)
    assert (failed.code, failed.out) == (2, "")
    assert word in failed.err and failed.err.count("\n") == 1


def test_a_chat_of_another_model_or_without_a_chat_is_refused(chat, save_model, tmp_path):
    file = tmp_path / "evening.chat"
    chat(f"the cat\n/save {file}\n", model=save_model(head_dim=32))
    assert "another model" in chat(f"/load {file}\n").err
    chat(f"the cat\n/save {file}\n", "--dtype", "bfloat16")
    assert "bfloat16" in chat(f"/load {file}\n").err
    assert "'" + str(tmp_path) + "' is not a file" in chat(f"/load {tmp_path}\n").err


OPTIONS = {
    "share": (("--budget", "10%"), ("a budget of 10%", "--budget 512")),
    "long chunk": (("--cache", "every=225"), ("every=225", "224")),
    "budget beyond the window": (("--budget", "240+16"), ("256", "lower")),
    "clamped RoPE": (("--cache", "positions=clamped"), ("clamped", "rolling")),
    "one prompt": (("--policy", "snapkv"), ("a chat has many turns; choose best or h2o",)),
    "system of a saved chat": (
        ("--load", bundled_model_path() / "model.safetensors", "--system", "y"),
        ("--system", "--load"),
    ),
    "pin": (("--pin", "systm"), ("pin 'systm'", "did you mean system?")),
    "repair": (("--verify", "repair"), ("--verify repair makes one answer again",)),
}


@pytest.mark.parametrize(("args", "words"), OPTIONS.values(), ids=OPTIONS.keys())
def test_invalid_chat_options_are_refused(chat, args, words):
    outcome = chat("the cat\n", *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("h2okv: ") and outcome.err.count("\n") == 1
    for word in words:
        assert word in outcome.err


def test_models_without_rolling_positions_keep_original_ones_with_one_note(chat, monkeypatch):
    outcome = chat("the cat\nthe dog\n", "--policy", "full")
    assert len(statuses(outcome)) == 2
    (remark,) = remarks(outcome)
    assert remark.startswith("note: positions stay original") and "evicts nothing" in remark

    # Some models tell only when they attend.
    class Unrollable(h2okv.H2OCache):
        def update(self, *args, **kwargs):
            if self.position_rule.rolls:
                raise ValueError("positions='rolling': cannot find out how it turns its keys.")
            return super().update(*args, **kwargs)

    monkeypatch.setattr(h2okv, "H2OCache", Unrollable)
    outcome = chat("the cat\n")
    assert len(statuses(outcome)) == 1
    (remark,) = remarks(outcome)
    assert "cannot find out how it turns its keys" in remark


def test_a_system_message_that_the_template_rejects_is_refused(chat, chat_tokenizer, save_model):
    folder = save_model()
    template = "{{ raise_exception('only users') if messages[0].role == 'system' }}x"
    chat_tokenizer(template).save_pretrained(folder)
    outcome = chat("the cat\n/cache\n", "--system", "be brief", model=folder)
    assert outcome.code == 0
    refusal, empty = outcome.err.splitlines(keepends=True)
    assert "only users" in refusal and "--system" in refusal
    assert empty == EMPTY


def test_two_ctrl_c_at_the_prompt_leave(capsys):
    events = iter([KeyboardInterrupt, "", KeyboardInterrupt, KeyboardInterrupt, "never"])

    def read_line(prompt):
        event = next(events)
        if event is KeyboardInterrupt:
            raise event
        return event

    assert converse(None, read_line) == 130
    assert next(events) == "never"
    assert "(Ctrl-C again leaves)" in capsys.readouterr().err
