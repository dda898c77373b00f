"""What the tokens of a step belong to: worked out once, and shared by all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from h2okv.vllm_plugin.state import StateLayer, StatePool, on_device

# Each needs copies of its entries while its chunk is read.
_MOST_TOGETHER = 16


@dataclass
class Chunk:
    """As many tokens of each of B requests: of their prompts, or several that they read again."""

    tokens: slice  # their place among those of the step
    seen: Tensor  # each request's tokens before these, int64 [B]
    is_first: bool  # whether these are the first tokens of all requests; else of none
    index: Tensor  # their blocks, int64 [B]


@dataclass
class Batch:
    """A step's requests. Single tokens are read together, and so are chunks of the same length."""

    chunks: list[Chunk]
    rows: slice | Tensor  # the single tokens among those of the step
    seen: Tensor  # each request's tokens before, int64 [B]
    index: Tensor  # its block, int64 [B]
    numbers: list[int] | None  # the same for the host, where it costs nothing
    least_seen: int  # the smallest of `seen`
    num_tokens: int

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        lengths: Sequence[int],
        table: Tensor,
        pool: StatePool,
        block_size: int | None = None,
    ) -> Batch:
        """End the spans of the step before, sort a step's requests, and make their blocks ready.

        Mutates the pool, and does not wait for the device.

        Tokens begin at `starts`, which ends with their number; `lengths` count them too, 0 for
        padding. The table is ``[R, columns]``, negative for no block. After `block_size` tokens a
        request goes on in another block, with a copy of the last one; ``None``: it stays.
        """
        pool.end_spans()
        counts = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
        active = [row for row, count in enumerate(counts) if count > 0]
        seen = [length - count for length, count in zip(lengths, counts, strict=True)]
        index = table[:, 0].clamp(min=0).long()
        if block_size is not None:
            index = _go_on(seen, lengths, active, table, pool, block_size)
        single = [row for row in active if counts[row] == 1]
        new = [row for row in single if seen[row] == 0]
        if new:
            pool.clean(index[on_device(new, table)])
        chunks = []
        for rows_of in _alike([row for row in active if counts[row] > 1], counts, seen):
            first, last = rows_of[0], rows_of[-1]
            tokens = slice(starts[first], starts[last + 1])
            seen_of = on_device(seen[first : last + 1], table)
            chunks.append(Chunk(tokens, seen_of, not seen[first], index[first : last + 1]))
        # Decodes come first in most servers' batches.
        offsets = [starts[row] for row in single]
        is_first = offsets == single == list(range(len(single)))
        rows = slice(0, len(single)) if is_first else on_device(offsets, table)
        single_index = index[: len(single)] if is_first else index[on_device(single, table)]
        single_seen = [seen[row] for row in single]
        span = pool.layers[0].span
        ends = [row for row, n in enumerate(single_seen) if span > 1 and (n + 1) % span == 0]
        if ends:
            pool.ended = (
                [single_seen[row] + 1 for row in ends],
                single_index[on_device(ends, table)],
            )
        return cls(
            chunks, rows, on_device(single_seen, table), single_index,
            single_index.tolist() if single_index.is_cpu else None,
            min(single_seen, default=0), starts[len(counts)],
        )  # fmt: skip

    def run(
        self, layer: StateLayer, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        """Run the tokens of all requests, concatenated, through a layer; mutates its blocks.

        Query ``[T, HQ, D]``, key and value ``[T, H, D]``; output ``[T, HQ, D]``, zero for padding.
        """
        if self.num_tokens < len(output):
            output[self.num_tokens :] = 0
        for chunk in self.chunks:
            at = chunk.tokens
            output[at] = layer.run_block(
                query[at], key[at], value[at], chunk.seen, chunk.index, chunk.is_first
            )
        if not len(self.index):
            return
        at_rows, is_full = self.rows, self.least_seen >= layer.largest.total
        states, target = (query[at_rows], key[at_rows], value[at_rows]), output[at_rows]
        layer.run_step(*states, self.seen, self.index, self.numbers, is_full, target)
        if not isinstance(at_rows, slice):
            output[at_rows] = target


def _go_on(
    seen: Sequence[int],
    lengths: Sequence[int],
    active: Sequence[int],
    table: Tensor,
    pool: StatePool,
    size: int,
) -> Tensor:
    """Return each request's block, int64 ``[R]``, with a copy of the last one where it is new."""
    columns = [max(length - 1, 0) // size for length in lengths]
    before = [max(count - 1, 0) // size for count in seen]
    moved = [row for row in active if seen[row] and before[row] != columns[row]]
    index = table.gather(1, on_device(columns, table).unsqueeze(1)).squeeze(1).clamp(min=0).long()
    if moved:
        source = table[on_device(moved, table), on_device([before[row] for row in moved], table)]
        pool.copy(source.clamp(min=0).long(), index[on_device(moved, table)])
    return index


def _alike(rows: Sequence[int], counts: Sequence[int], seen: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of neighbouring requests with as many tokens, all at their beginning or none."""
    run: list[int] = []
    for row in rows:
        if run and not (
            len(run) < _MOST_TOGETHER
            and row == run[-1] + 1
            and counts[row] == counts[run[0]]
            and (seen[row] == 0) == (seen[run[0]] == 0)
        ):
            yield run
            run = []
        run.append(row)
    if run:
        yield run
