"""MT-Bench as one conversation without end: the full cache beside small ones that roll.

The example of the llama-cookbook asks all questions on one cache that is never emptied. Here every
cache reads the same text: the questions, each with MT-Bench's reference answer where it has one. A
row is a turn: how the cache predicts the question and the reference and, in some turns, what it
answers itself, on a copy, how fast, and its bytes. A cache that exceeds ``--memory`` ends there.
Rows are written up to each such answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import quality
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import h2okv
from h2okv.calibration.layer_budgets import budgets_of_model
from h2okv.cli.readers import memory
from h2okv.config import CacheConfig
from h2okv.integration.enable import read_blocks
from h2okv.models.packed_linear import pack_linear_layers
from h2okv.prompts.chat_template import encode
from h2okv.records import naming
from h2okv_lab.evaluation.streaming import ConversationSource
from h2okv_lab.tables import CsvFile, check_minimum

COLUMNS = (
    "date", "model", "dtype", "cache", "conversation", "turn", "position", "question_tokens",
    "question_nll", "reference_tokens", "reference_nll", "cache_bytes", "seconds_per_token", "text",
)  # fmt: skip
BLOCK, FULL_BLOCK = 64, 512  # tokens of a forward; 64 are between two evictions
Row = dict[str, Any]


class Reader:
    """One cache, the text that it has read, and texts that it has yet to read."""

    def __init__(self, model: PreTrainedModel, config: CacheConfig) -> None:
        self.model = model
        self.cache = h2okv.H2OCache.from_config(model, config)
        self.block = FULL_BLOCK if config.is_full else BLOCK
        self.last: Tensor | None = None  # logits [V] of the token after the text
        self._pending: list[tuple[Row, str, list[int]]] = []

    def add(self, row: Row, name: str, ids: list[int]) -> None:
        """Add a text; reading it fills in the row's ``NAME_nll`` and ``position``."""
        row |= {f"{name}_tokens": len(ids)}
        if ids:
            self._pending.append((row, name, ids))

    def read(self) -> None:
        """Read the pending texts in blocks."""
        ids = [token for _, _, text in self._pending for token in text]
        position, start = self.cache.num_seen_tokens, 0
        values: list[float] = []
        for end, logits in read_blocks(
            self.model, torch.tensor([ids]), self.cache, self.block, all_logits=True
        ):
            first = logits[0, :1] if self.last is None else self.last[None]
            predictions = torch.cat([first, logits[0, :-1]]).float()
            targets = torch.tensor(ids[start:end])
            values += cross_entropy(predictions, targets, reduction="none").tolist()
            self.last, start = logits[0, -1], end
        for row, name, text in self._pending:
            scored, values = values[: len(text)], values[len(text) :]
            # No token comes before the first of all.
            row[f"{name}_nll"] = f"{statistics.fmean(scored[position == 0 :]):.4f}"
            position += len(text)
            row["position"] = position
        self._pending = []

    def answer(self, count: int, end: int | None) -> tuple[list[int], float | None]:
        """Write greedily on a copy of the cache; return tokens and the median seconds of one."""
        assert self.last is not None
        copy, ids, seconds = self.cache.fork(1), [int(self.last.argmax())], []
        while len(ids) < count and ids[-1] != end:
            began = time.perf_counter()
            ((_, logits),) = read_blocks(self.model, torch.tensor([ids[-1:]]), copy)
            ids.append(int(logits[0, -1].argmax()))
            seconds.append(time.perf_counter() - began)
        return ids, statistics.median(seconds) if seconds else None


def config_of(spec: str) -> CacheConfig:
    """Return a cache that rolls and evicts every `BLOCK` tokens, or the full one."""
    config = CacheConfig.from_spec(spec)
    if config.is_full:
        return config
    return CacheConfig.from_spec(f"{spec},positions=rolling,every={BLOCK}")


def read_all(options: argparse.Namespace) -> None:
    """Read the conversation with each cache; write the rows."""
    limit = memory("--memory", options.memory) if options.memory else None
    check_minimum(answer=options.answer)
    configs = {spec: config_of(spec) for spec in options.cache}
    with naming(options.input, "read", "give MT-Bench's question.jsonl"):
        lines = options.input.read_text("utf-8").splitlines()
    references = [json.loads(line).get("reference", []) for line in lines]
    model, tokenizer = h2okv.load(options.model, dtype=options.dtype)
    pack_linear_layers(model)
    vocab = model.config.vocab_size
    source = ConversationSource(options.input, tokenizer, vocab)
    file = CsvFile(options.csv, COLUMNS)
    common = {"date": time.strftime("%Y-%m-%d"), "model": options.model, "dtype": options.dtype}
    for spec, config in configs.items():
        reader = Reader(model, budgets_of_model(model, config))
        rows: list[Row] = []
        for number, turn in ((n, t) for n in range(len(source)) for t in range(len(source[n]))):
            row = common | {"cache": spec, "conversation": number + 1, "turn": turn + 1}
            row["reference_tokens"] = 0
            rows.append(row)
            reader.add(row, "question", source[number][turn].ids.tolist())
            if number % options.answer == 0 and turn == 0:
                reader.read()
                for earlier in rows[:-1]:
                    file.append(earlier)
                rows = rows[-1:]
                row["cache_bytes"] = reader.cache.nbytes
                print(spec, row["position"], row["question_nll"], row["cache_bytes"], flush=True)
                if limit is not None and reader.cache.nbytes > limit:
                    break
                tokens, seconds = reader.answer(32, tokenizer.eos_token_id)
                row["seconds_per_token"] = "" if seconds is None else f"{seconds:.4f}"
                row["text"] = json.dumps(tokenizer.decode(tokens, skip_special_tokens=True))
            text = references[number][turn] if turn < len(references[number]) else ""
            reader.add(row, "reference", encode(tokenizer, text, vocab, False) if text else [])
        else:
            reader.read()
        for row in rows:
            file.append(row)
    file.close()


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(
        __doc__,
        "mtbench_stream.py --input question.jsonl --cache full --cache h2o:1024 --memory 320MiB"
        " --csv mtbench_stream.csv",
    )
    parser.add_argument("--input", type=Path, required=True, help="MT-Bench's question.jsonl")
    parser.add_argument("--cache", action="append", required=True, help="full, h2o:1024, ...")
    parser.add_argument("--answer", type=int, default=5, help="in each n-th conversation (5)")
    parser.add_argument("--memory", help="end a cache that is larger, such as 320MiB")
    quality.run_alone(parser, read_all)


if __name__ == "__main__":
    main()
