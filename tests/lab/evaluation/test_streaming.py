import errno
import math
import mmap
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import h2okv
from h2okv.engine.memory import resident_bytes
from h2okv_lab.evaluation.streaming import (
    Stream,
    StreamFile,
    StreamRow,
    StreamSettings,
    TextSource,
)
from h2okv_lab.tables import read_csv

pytestmark = pytest.mark.slow

ROLLING = {"heavy": 12, "recent": 12, "positions": "rolling"}


@pytest.fixture
def begin(make_llama):
    """Make a stream on a tiny model; the same one for the same options."""
    model = make_llama(attention="sdpa")

    def make(source, settings, budget=ROLLING, **options):
        cache = h2okv.H2OCache(model.config, **budget)
        return Stream(model, cache, source, settings, **options)

    return make


def drain(stream):
    """Read to the end: all rows, the unfinished one among them, and the answers."""
    rows, answers = [], []
    for step in stream.blocks():
        rows += step.rows
        answers += [step.answer] if step.answer else []
    assert rows == stream.rows[len(stream.rows) - len(rows) :]
    return rows + stream.all_rows()[len(stream.rows) :], answers


def nlls(rows):
    return [(row.position, row.nll) for row in rows]


def test_a_wide_budget_scores_as_the_model_without_a_cache(begin, text_source):
    stream = begin(text_source, StreamSettings(block=16, every=100), {"heavy": 400, "recent": 1})
    rows, _ = drain(stream)
    ids = text_source.ids
    with torch.no_grad():
        logits = stream.model(ids[None, :-1], use_cache=False).logits[0]
    expected = F.cross_entropy(logits, ids[1:], reduction="none").double()
    assert [row.position for row in rows] == [100, 200, 300, 330]
    for row, chunk in zip(rows, expected.split(100), strict=True):
        assert row.nll == pytest.approx(chunk.mean().item(), abs=1e-5)
    assert stream.total_nll == pytest.approx(expected.sum().item(), rel=1e-6)
    assert stream.model.config._attn_implementation == "sdpa"


def test_chunk_1_is_one_token_after_another(begin, text_source):
    stream = begin(text_source, StreamSettings(block=1, every=50, tokens=150))
    rows, _ = drain(stream)
    cache = h2okv.H2OCache(stream.model.config, **ROLLING)
    losses = []
    with h2okv.enable(stream.model), torch.no_grad():
        for token, following in zip(text_source.ids[:150], text_source.ids[1:151], strict=True):
            logits = stream.model(token.view(1, 1), past_key_values=cache).logits[0]
            losses.append(F.cross_entropy(logits, following.view(1)).item())
    means = [math.fsum(losses[i : i + 50]) / 50 for i in (0, 50, 100)]
    assert [row.nll for row in rows] == pytest.approx(means, abs=1e-6)


def test_rows_do_not_depend_on_how_they_cut_the_blocks(begin, text_source):
    fine, _ = drain(begin(text_source, StreamSettings(block=16, every=7)))
    coarse, _ = drain(begin(text_source, StreamSettings(block=16, every=70)))
    assert [row.position for row in fine][:4] == [7, 14, 21, 28]
    for number, row in enumerate(coarse[:4]):
        mean = math.fsum(fine_row.nll for fine_row in fine[10 * number : 10 * number + 10]) / 10
        assert row.nll == pytest.approx(mean, rel=1e-9)
    assert all(row.step_seconds > 0 for row in fine)


def test_the_cache_stays_as_small_as_its_budget(begin, text_source):
    stream = begin(text_source, StreamSettings(block=16, every=100))
    rows, _ = drain(stream)
    assert stream.cache.num_cached_tokens == 24
    assert len({row.cache_bytes for row in rows}) == 1
    assert all(row.rss_bytes > row.cache_bytes for row in rows)


def test_the_limit_ends_a_stream_within_a_block(begin, text_source):
    stream = begin(text_source, StreamSettings(block=16, every=20, tokens=50))
    rows, _ = drain(stream)
    assert [row.position for row in rows] == [20, 40, 50]
    assert stream.cache.num_seen_tokens == stream.position == 50


def test_stream_answers_equal_generate_on_one_cache(begin, chat_source):
    wide = {"heavy": 400, "recent": 1}
    stream = begin(chat_source, StreamSettings(block=8, every=1000, max_new_tokens=5), wide)
    _, answers = drain(stream)
    ids = torch.empty(0, dtype=torch.int64)
    expected = []
    for sample in range(len(chat_source)):
        for segment in chat_source[sample]:
            ids = torch.cat([ids, segment.ids])
            if segment.answers:
                with torch.no_grad():
                    ids = stream.model.generate(
                        ids[None], max_new_tokens=5, do_sample=False, pad_token_id=0
                    )[0]
                expected.append(tuple(ids[-5:].tolist()))
    assert answers == expected
    # All but the last token went through the cache, and each was scored once.
    assert stream.cache.num_seen_tokens == stream.position == len(ids) - 1
    with torch.no_grad():
        logits = stream.model(ids[None, :-1], use_cache=False).logits[0]
    total = F.cross_entropy(logits, ids[1:], reduction="sum").item()
    assert stream.total_nll == pytest.approx(total, rel=1e-5)


def test_an_end_token_ends_the_answer_and_is_read_once(begin, segments):
    source_ids = torch.arange(10, 30).tolist()
    from_model = begin(segments([[(source_ids, True)]]), StreamSettings(max_new_tokens=9))
    _, (free,) = drain(from_model)
    end = free[3]
    again = segments([[(source_ids, True), ([end, 5, 6], True)]])
    stream = begin(again, StreamSettings(max_new_tokens=9))
    stream.model.generation_config.eos_token_id = [end, 96]
    stream = Stream(stream.model, stream.cache, again, stream.settings)
    try:
        _, answers = drain(stream)
    finally:
        stream.model.generation_config.eos_token_id = None
    first = free.index(end) + 1
    assert answers[0] == free[:first]
    # The question, the answer with its end token once, the next question's rest, and an answer.
    assert stream.position == 20 + first + 2 + len(answers[1]) - 1


def test_a_row_is_a_turn_and_scores_what_the_model_was_given(begin, chat_source):
    wide = {"heavy": 400, "recent": 1}
    stream = begin(chat_source, StreamSettings(block=8, every=None, max_new_tokens=5), wide)
    rows, answers = drain(stream)
    ids, spans, ends = [], [], []
    for segment in (turn for sample in range(len(chat_source)) for turn in chat_source[sample]):
        spans.append((len(ids), len(ids) + len(segment.ids)))
        ids += segment.ids.tolist() + (list(answers.pop(0)) if segment.answers else [])
        ends.append(len(ids) - 1)  # the last token is read with the next turn
    with torch.no_grad():
        logits = stream.model(torch.tensor([ids]), use_cache=False).logits[0]
    values = F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    expected = [values[max(start - 1, 0) : end - 1].mean().item() for start, end in spans]
    assert [row.nll for row in rows] == pytest.approx(expected, rel=1e-4)
    assert [row.position for row in rows] == ends


@pytest.mark.parametrize("name", ["block", "every", "tokens", "max_new_tokens"])
def test_invalid_settings_are_refused(name):
    with pytest.raises(ValueError, match=r"0 is too few; give 1 or more"):
        StreamSettings(**{name: 0})


def test_a_text_of_one_token_cannot_be_scored():
    with pytest.raises(
        ValueError, match="the text must have at least 2 tokens to be scored, got 1"
    ):
        TextSource(torch.tensor([5]))


ROWS = [StreamRow(100, 0.1 + 0.2, 0.0125, 1000, 50), StreamRow(200, 1 / 3, 0.25, None, 50)]


def read_rows(path):
    return [StreamRow(**cells) for cells in read_csv(path)]


def test_rows_round_trip_exactly(tmp_path):
    path = tmp_path / "rows.csv"
    file = StreamFile(path)
    file.extend(ROWS[:1])
    assert read_rows(path) == ROWS[:1]  # before it is closed, as after a kill
    file.extend(ROWS[1:])
    assert read_rows(path) == ROWS
    assert path.read_text().splitlines()[0] == "position,nll,step_seconds,rss_bytes,cache_bytes"
    file.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "rows.csv"
    StreamFile(path).close()
    before = path.read_text()
    with pytest.raises(ValueError, match="exists already; choose another name"):
        StreamFile(path)
    assert path.read_text() == before


def test_an_unwritable_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        StreamFile(tmp_path / "nowhere" / "rows.csv")


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    file = StreamFile(tmp_path / "rows.csv")

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file, "_file", SimpleNamespace(write=no_room, flush=no_room))
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\)"):
        file.extend(ROWS)
    monkeypatch.undo()
    file.close()


def test_resident_bytes_grow_with_allocations():
    before = resident_bytes()
    if before is None:
        pytest.skip("this system does not say")
    # New pages: what malloc gives may be memory that was freed and has stayed resident.
    with mmap.mmap(-1, 64 << 20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert resident_bytes() - before > 0.9 * len(block)
