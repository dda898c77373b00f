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

    At the end, rows that are not complete are written too: a stream of 2,500 tokens has a third
    row of 500. A checkpoint holds the state before that, so that a stream can be made longer.

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
    ended = True
    blocks = stream.blocks()
    try:
        for step in blocks:
            if rows is not None and step.rows:
                rows.append(step.rows)
            on_step(step)
            position = stream.state.position
            if checkpoint is not None and position - saved >= save_every:
                stream.save(checkpoint)
                saved = position
            if should_stop():
                ended = False
                break
    finally:
        blocks.close()  # gives the model its own attention back
    if checkpoint is not None and stream.state.position > saved:
        stream.save(checkpoint)
    last = stream.last_row()
    if ended and last is not None and rows is not None:
        rows.append([last])
    return ended
