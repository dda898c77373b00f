import json
import signal
import sys
import time
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from h2okv_lab.evaluation.streaming import StreamRow
from h2okv_lab.tables import read_csv

pytestmark = pytest.mark.slow

WAIT = 120
BUDGET = ("--budget", "16+16", "--cache", "every=8")
TURNS = [{"question_id": 1, "category": "x", "turns": ["the cat sat", "and the dog"]}] * 2


@pytest.fixture
def book(tmp_path, prompt):
    path = tmp_path / "book.txt"
    path.write_text(prompt * 8, encoding="utf-8")
    return path


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, TURNS)), encoding="utf-8")
    return path


@pytest.fixture
def stream(h2okv_command, model_folder):
    def call(*args, model=model_folder, budget=BUDGET):
        if "full" in args:  # which takes no budget
            budget = budget[2:]
        return h2okv_command("stream", "--model", model, *budget, *args)

    return call


def read_rows(path):
    return [StreamRow(**cells) for cells in read_csv(path)]


def nlls(path):
    return [(row.position, row.nll) for row in read_rows(path)]


def test_stream_writes_rows_figure_and_summary(stream, book, tmp_path):
    rows, picture = tmp_path / "rows.csv", tmp_path / "rows.png"
    outcome = stream(
        "--text", book, "--tokens", 250, "--every", 100, "--csv", rows, "--plot", picture
    )
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith("250 tokens | perplexity ")
    assert [row.position for row in read_rows(rows)] == [100, 200, 250]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rows_as_json(stream, book):
    outcome = stream("--text", book, "--tokens", 200, "--every", 100, "--json")
    record = json.loads(outcome.out)
    assert (record["tokens"], record["policy"], record["heavy"]) == (200, "h2o", 16)
    assert [row["position"] for row in record["rows"]] == [100, 200]


def test_a_text_is_read_past_the_context_window(stream, book, tmp_path):
    rows = tmp_path / "rows.csv"
    outcome = stream("--text", book, "--tokens", 400, "--every", 100, "--csv", rows)
    assert outcome.code == 0
    assert len({row.cache_bytes for row in read_rows(rows)}) == 1
    rows = tmp_path / "full.csv"
    outcome = stream(
        "--text", book, "--tokens", 400, "--every", 100, "--csv", rows, "--policy", "full"
    )
    assert outcome.code == 0
    sizes = [row.cache_bytes for row in read_rows(rows)]
    assert sizes == sorted(set(sizes))


def test_a_short_text_is_read_to_its_end(stream, tmp_path, tokenizer):
    path = tmp_path / "short.txt"
    path.write_text("the cat sat on the mat")
    read = len(tokenizer("the cat sat on the mat")["input_ids"]) - 1
    outcome = stream("--text", path, "--tokens", 500)
    assert outcome.code == 0
    assert f"note: the text has {read} tokens to read, not 500\n" in outcome.err
    assert f"\n{read} tokens | perplexity" in outcome.err


def test_conversations_are_answered_on_one_cache(stream, chats, tmp_path):
    rows = tmp_path / "rows.csv"
    outcome = stream("--input", chats, "--max-new-tokens", 5, "--csv", rows, "--every", 10)
    assert outcome.code == 0
    headings = [line for line in outcome.out.splitlines() if line.startswith("--- sample")]
    assert headings == [f"--- sample {i}, answer {j} ---" for i in (1, 2) for j in (1, 2)]
    positions = [row.position for row in read_rows(rows)]
    assert positions[:3] == [10, 20, 30]
    by_turn = tmp_path / "turns.csv"
    assert stream("--input", chats, "--max-new-tokens", 5, "--csv", by_turn).code == 0
    assert len(read_rows(by_turn)) == 4


def test_budget_and_chunk_must_fit_the_window(stream, book):
    budget = ("--budget", "200+49", "--cache", "every=8")
    outcome = stream("--text", book, "--tokens", 300, budget=budget)
    assert outcome.code == 2
    assert "a budget of 249 entries and every=8 are more than the context" in outcome.err
    budget = ("--budget", "200+48", "--cache", "every=8")
    assert stream("--text", book, "--tokens", 300, budget=budget).code == 0


def test_the_default_budget_is_a_fraction_of_the_window(stream, book, tmp_path):
    def size(*budget):
        rows = tmp_path / f"{len(budget)}.csv"
        stream("--text", book, "--tokens", 100, "--csv", rows, budget=budget)
        return read_rows(rows)[-1].cache_bytes

    assert size() == size("--budget", "32+32")
    assert size() == size("--budget", "12.5%+0.125")  # of the context window


def test_learned_positions_end_with_the_window(stream, book, model_folder, tmp_path):
    config = OPTConfig(
        vocab_size=300, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=32,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "opt")

    def call(*args, cache="every=8"):
        args = ("--text", book, "--tokens", 100, *args)
        budget = ("--budget", "16+16", "--cache", cache)
        return stream(*args, model=tmp_path / "opt", budget=budget)

    for args, complaint in [
        ((), "'opt' has no rotary positions"),
        (("--policy", "full"), "learned positions for 64 tokens, and the stream needs 100"),
    ]:
        outcome = call(*args)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1)
        assert complaint in outcome.err
    assert call(cache="every=8,positions=clamped").code == 0
    assert call("--tokens", 64, cache="every=8,positions=original").code == 0


def test_bad_sources_are_one_sentence(stream, book, chats, tmp_path):
    for args, complaint in [
        ((), "neither --text nor --input is given"),
        (("--text", book, "--input", chats), "both --text and --input are given"),
        (("--text", tmp_path / "missing"), "cannot be read"),
        (("--input", book), "line 1 of"),
    ]:
        outcome = stream(*args)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1)
        assert complaint in outcome.err
    book.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in stream("--text", book).err
    book.write_text("")
    assert "is empty" in stream("--text", book).err
    book.write_text("a")
    assert "must have at least 2 tokens to be scored" in stream("--text", book).err


def test_existing_files_are_not_overwritten(stream, book, tmp_path):
    path = tmp_path / "precious"
    path.write_text("precious")
    outcome = stream("--text", book, "--tokens", 50, "--csv", path)
    assert outcome.code == 2
    assert "exists already" in outcome.err
    assert path.read_text() == "precious"


def test_the_extra_for_pictures_is_named_before_the_run(stream, book, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows = tmp_path / "rows.csv"
    outcome = stream("--text", book, "--csv", rows, "--plot", tmp_path / "rows.png")
    assert outcome.code == 2
    assert "pip install '.[plot]'" in outcome.err
    assert not rows.exists()


def test_nan_logits_keep_earlier_rows(stream, book, tmp_path, monkeypatch):
    forward, calls = LlamaForCausalLM.forward, []

    def overflow(self, *args, **options):
        output = forward(self, *args, **options)
        calls.append(1)
        if len(calls) == 20:
            output.logits[:] = torch.nan
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", overflow)
    rows = tmp_path / "rows.csv"
    outcome = stream("--text", book, "--csv", rows, "--every", 50)
    assert outcome.code == 2
    assert "not a number after 152 tokens" in outcome.err
    assert [row.position for row in read_rows(rows)] == [50, 100, 150]


@pytest.fixture
def start(start_command, model_folder):
    return partial(start_command, "stream", "--model", model_folder, *BUDGET)


def wait_for_rows(path, process, count):
    deadline = time.monotonic() + WAIT
    while not path.exists() or len(path.read_text().splitlines()) <= count:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_stream_leaves_its_rows(start, stream, tmp_path, prompt):
    book = tmp_path / "book.txt"
    book.write_text(prompt * 2000, encoding="utf-8")
    rows, uninterrupted = tmp_path / "rows.csv", tmp_path / "whole.csv"
    args = ("--text", book, "--every", 20)
    process = start(*args, "--csv", rows)
    wait_for_rows(rows, process, 20)
    process.kill()
    process.communicate(timeout=WAIT)
    before = nlls(rows)
    assert stream(*args, "--csv", uninterrupted, "--tokens", before[-1][0] + 8).code == 0
    assert before == nlls(uninterrupted)[: len(before)]  # the last block is short


@pytest.fixture
def control_c(monkeypatch):
    """Send Ctrl-C in the middle of a forward, several times in a row."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    forward, calls = LlamaForCausalLM.forward, []

    def at(call, times=1):
        def interrupted(self, *args, **options):
            calls.append(1)
            for _ in range(times if len(calls) == call else 0):
                signal.raise_signal(signal.SIGINT)
            return forward(self, *args, **options)

        monkeypatch.setattr(LlamaForCausalLM, "forward", interrupted)

    yield at
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_finishes_the_block(stream, book, tmp_path, control_c):
    rows, uninterrupted = tmp_path / "rows.csv", tmp_path / "whole.csv"
    picture = tmp_path / "rows.png"
    args = ("--text", book, "--every", 20)
    control_c(13)
    outcome = stream(*args, "--csv", rows, "--plot", picture)
    assert (outcome.code, outcome.out) == (130, "")
    summary, remark = outcome.err.splitlines()
    assert summary.startswith("104 tokens | ")
    assert remark == "stopped before the end; the same command begins again at the start"
    assert [row.position for row in read_rows(rows)] == [20, 40, 60, 80, 100]
    assert picture.exists()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert stream(*args, "--csv", uninterrupted, "--tokens", 104).code == 0
    assert nlls(rows) == nlls(uninterrupted)[:5]


def test_a_second_ctrl_c_does_not_wait(stream, book, tmp_path, control_c):
    rows = tmp_path / "rows.csv"
    control_c(13, times=2)
    outcome = stream("--text", book, "--every", 5, "--csv", rows)
    assert outcome.code == 130
    assert outcome.err.startswith("96 tokens | ")
    assert [position for position, _ in nlls(rows)] == list(range(5, 96, 5))
