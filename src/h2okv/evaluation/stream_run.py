"""A stream run to its end, its rows in a file and its checkpoints saved on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from h2okv.evaluation.stream import Step, Stream
from h2okv.evaluation.stream_record import RowFile


def run_stream(
    stream: Stream,
    *,
    rows: RowFile | None = None,
    checkpoint: Path | None = None,
    save_every: int = 10_000,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[Step], None] = lambda _: None,
) -> bool:
    """Reads a stream until it ends or is stopped; mutates it.

    At the end, a row that is not complete is written too: a stream of 2,500 tokens has a third row
    of 500. The last checkpoint is older than that row, and than a block that the stream's limit
    cut short, so that a stream can be made longer as if it had been so from the start.

    Args:
        stream: A new or a resumed stream.
        rows: Where rows go.
        checkpoint: Where to save, between blocks, at the end, and when stopped.
        save_every: Tokens between two checkpoints.
        should_stop: Asked after every block.
        on_step: Told after every block, when its rows are written.

    Returns:
        Whether the stream came to its end.

    Raises:
        ValueError: If the model's output is no number, or a file cannot be written.
    """
    saved = stream.state.position
    ended, cut = True, False
    blocks = stream.blocks()
    try:
        for step in blocks:
            if rows is not None and step.rows:
                rows.append(step.rows)
            on_step(step)
            position = stream.state.position
            is_due = position - saved >= (1 if step.precedes_cut else save_every)
            if checkpoint is not None and is_due and not cut:
                stream.save(checkpoint)
                saved = position
            cut = cut or step.precedes_cut
            if should_stop():
                ended = False
                break
    finally:
        blocks.close()  # gives the model its own attention back
    if checkpoint is not None and stream.state.position > saved and not cut:
        stream.save(checkpoint)
    last = stream.last_row()
    if ended and last is not None and rows is not None:
        rows.append([last])
    return ended
