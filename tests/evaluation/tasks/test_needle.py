import pytest

from h2okv.config import CacheConfig
from h2okv.evaluation.plots import plot_needles
from h2okv.evaluation.tasks.needle import Grid, Needle, NeedleTask

pytestmark = pytest.mark.slow

FULL = CacheConfig("full")
GRID = Grid((128, 256), (0.0, 0.5, 1.0), tries=2)


def prepared(subject, novel, compression="query-agnostic", seed=0, grid=GRID, needle=None):
    task = NeedleTask("needle", novel, grid, needle or Needle(), compression, seed)
    task.prepare(subject, [FULL])
    return task


def test_the_needle_stands_where_it_should(subject, novel):
    task = prepared(subject, novel)
    for (length, depth, _), (context, question, answer) in zip(
        GRID.places(), task._encoded, strict=True
    ):
        assert len(context) + len(question) == length
        text = subject.decode(context)
        before, found, _ = text.partition(" The city of ")
        assert found and f" is {answer}." in text
        # It stands at a sentence's end, which may be some tokens away.
        assert len(before) / len(text) == pytest.approx(depth, abs=0.3)
        if depth == 0:
            assert before == ""
        if depth == 1:
            assert text.endswith(f"is {answer}.")


def test_tries_are_other_needles_in_other_text(subject, novel):
    first, second = prepared(subject, novel)._encoded[:2]
    assert first != second
    assert prepared(subject, novel)._encoded == prepared(subject, novel)._encoded
    assert prepared(subject, novel, seed=1)._encoded != prepared(subject, novel)._encoded


def test_a_full_cache_finds_what_the_model_can_recall(subject, novel, tmp_path):
    grid = Grid((128, 160), (0.0, 1.0), tries=2)
    rows = []
    for compression in ("query-aware", "query-agnostic"):
        task = prepared(subject, novel, compression, grid=grid)
        results = {n: r for f in task.run(subject, FULL, task.samples(), 0) for n, r in f.items()}
        assert task.scores(results)["string_match"].value >= 0.75
        details = task.details(results)
        assert [(row["length"], row["depth"]) for row in details] == [
            (128, 0.0), (128, 1.0), (160, 0.0), (160, 1.0),
        ]  # fmt: skip
        rows += [{**task.columns, "policy": "full", "budget": "full", **row} for row in details]
    plot_needles(tmp_path / "n.png", rows, "needles")
    assert (tmp_path / "n.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid((), (0.5,)), "--lengths names nothing"),
        (lambda: Grid((5, 5), (0.5,)), "--lengths names a value twice"),
        (lambda: Grid((5,), (1.5,)), "--depths 1.5 is out of range"),
        (lambda: Grid((5,), (0.5,), 0), "--tries 0 is too few"),
        (lambda: Needle("The key is 7.", answer="8"), "does not hold the answer '8'"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("length", "message"),
    [(20, "has no room"), (90_000, "too few to hide"), (2040, "context window of 2048")],
)
def test_a_length_without_room_is_refused(subject, novel, length, message):
    with pytest.raises(ValueError, match=message) as caught:
        prepared(subject, novel, grid=Grid((length,), (0.5,)))
    assert "--too-long" not in str(caught.value)  # which this task does not have
