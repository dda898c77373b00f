"""Memory and machines for a large model and very many users, by arithmetic alone.

    python benchmarks/scaling_arithmetic.py            prints the tables
    python benchmarks/scaling_arithmetic.py --write    puts them into docs/results/scaling.md
    python benchmarks/scaling_arithmetic.py --model DIR --memory 24 --ranks 1,2,4

Bytes are calculated from the model's config as in `h2okv bench` and `h2okv serve`; machines and
users are assumptions, listed below and in the page. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as memoized
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

import h2okv
from h2okv.engine.memory import MemoryModel, ServingMemory
from h2okv_lab.benchmarking.model import Footprint
from h2okv_lab.tables import markdown_table

PAGE = Path(__file__).parents[1] / "docs" / "results" / "scaling.md"
GIB, MIB = 2**30, 2**20
CONTEXTS = (4096, 8192, 32768, 131072)
CACHES = ("full", "20 %", "10 %", "2,048 entries")
BATCHES = (1, 64, 256)
PIECE = 512
"""Tokens of a chunk of a prompt, as in `h2okv serve`."""
USERS = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Assumed:
    """Machines and users, none of them measured.

    Attributes:
        memory: Of one GPU, bytes.
        used: Share of it that may be taken.
        bandwidth: Of its memory, bytes in a second.
        products: Of one GPU in practice, operations in a second.
        links: Bytes in a second and direction between two ranks, by name.
        ranks: Sizes of a tensor parallel group.
        pause: Seconds in which a user reads and thinks between an answer and the next question.
        question: Tokens that are read for an answer.
        answer: New tokens of an answer.
        pace: New tokens of one answer in a second.
        patience: Seconds that a request may wait for a row.
        unlucky: Share of the requests that may wait longer.
    """

    memory: float = 80 * GIB
    used: float = 0.9
    bandwidth: float = 3.35e12
    products: float = 4e14
    links: tuple[tuple[str, float], ...] = (
        ("within a machine, 450 GB/s", 450e9),
        ("400 Gb/s", 50e9),
        ("100 Gb/s", 12.5e9),
    )
    ranks: tuple[int, ...] = (2, 4, 8)
    pause: float = 60.0
    question: int = 1000
    answer: int = 300
    pace: float = 20.0
    patience: float = 1.0
    unlucky: float = 0.01


class Subject:
    """A model whose weights are counted without allocating them.

    Args:
        config: Its config.
        name: Its name.
    """

    def __init__(self, config: PreTrainedConfig, name: str) -> None:
        self.config, self.name = config, name
        self.footprint = Footprint(config, torch.bfloat16)

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        plan = model.tp_plan
        names = {name: re.sub(r"\.\d+(?=\.)", ".*", name) for name, _ in model.named_modules()}
        self._splits_table = any(
            names[name] in plan
            for name, module in model.named_modules()
            if module is model.get_input_embeddings()
        )
        self._parameters = [
            (parameter.nbytes, names[name.rpartition(".")[0]] in plan)
            for name, parameter in model.named_parameters()
        ]

    def rank_bytes(self, ranks: int) -> float:
        """Weights of one rank; what the plan does not split is on every rank."""
        return sum(size / (ranks if split else 1) for size, split in self._parameters)

    def read_bytes(self, ranks: int) -> float:
        """Weights that one rank reads in a step: all but the table, of which it reads some rows."""
        table = self.footprint.weight_bytes - self.footprint.step_weight_bytes
        return self.rank_bytes(ranks) - (table / ranks if self._splits_table else table)

    @memoized  # noqa: B019 (lives as long as the program)
    def sizes(self, cache: str, context: int, ranks: int) -> ServingMemory:
        """Return one rank's memory besides the weights; each rank has a share of the KV heads.

        For H2O what `h2okv serve` counts. The full cache has no slots to score, and its prompts
        are read in their place.
        """
        entries = context if cache == "full" else entries_of(cache, context)
        empty = h2okv.H2OCache(self.config, heavy=entries // 2, recent=entries - entries // 2)
        memory = MemoryModel(self.config, empty, torch.bfloat16)
        if cache != "full":
            return memory.serving(empty.layer_entries_for(context), context, PIECE, ranks)
        return ServingMemory(
            sequence=self.footprint.full_bytes(1, context) // ranks,
            step=memory.decode_bytes(1, 0),
            prefill=memory.prefill_bytes(PIECE)
            + PIECE * memory.vocabulary * 4
            + memory.fixed_bytes,
        )

    def link_bytes(self, ranks: int, tokens: int, rows: int) -> float:
        """Return each rank's traffic of one forward: two reduced states a layer, and the logits.

        A ring sends ``2 (n - 1) / n`` times a state that is summed, ``(n - 1) / n`` times one that
        is only gathered.
        """
        text = self.config.get_text_config()
        states = 2 * text.num_hidden_layers + self._splits_table
        summed = states * tokens * text.hidden_size * 2
        gathered = rows * text.vocab_size * 2
        return (2 * summed + gathered) * (ranks - 1) / ranks


def entries_of(cache: str, context: int) -> int:
    """Return the entries that a budget keeps of a context."""
    number, unit = cache.split(" ", 1)
    value = int(number.replace(",", ""))
    return value * context // 100 if unit == "%" else min(value, context)


def room(subject: Subject, assumed: Assumed, ranks: int) -> float:
    """Bytes that the weights leave on one GPU; less than 0 where not even they fit."""
    return assumed.memory * assumed.used - subject.rank_bytes(ranks)


def users(subject: Subject, assumed: Assumed, ranks: int, cache: str, context: int) -> int:
    """Users of one group of ranks."""
    return subject.sizes(cache, context, ranks).num_seqs(int(room(subject, assumed, ranks)))


def rows_needed(load: float, hold: float, patience: float, unlucky: float) -> int:
    """Return the fewest rows with which few requests wait long (Erlang's C formula, M/M/c).

    Args:
        load: Requests that would be under way with rows for all of them, on average.
        hold: Seconds that a request takes a row, on average.
        patience: Seconds that a request may wait.
        unlucky: Share of the requests that may wait longer.

    Returns:
        Rows.
    """
    blocked, rows = 1.0, 0
    while True:
        rows += 1
        blocked = load * blocked / (rows + load * blocked)
        if rows <= load:
            continue
        waits = blocked / (1 - load / rows * (1 - blocked))
        if waits * math.exp(-(rows - load) * patience / hold) <= unlucky:
            return rows


def of_a_user(subject: Subject, assumed: Assumed) -> str:
    """Bytes of one user's cache."""
    lines = []
    for context in CONTEXTS:
        sizes = [subject.sizes(cache, context, 1).sequence / MIB for cache in CACHES]
        lines.append([f"{context:,}", *(f"{size:,.0f} MiB" for size in sizes)])
    return markdown_table(["tokens of context", *CACHES], lines)


def of_a_machine(subject: Subject, assumed: Assumed) -> str:
    """Users of one group of GPUs."""
    lines = []
    for ranks in assumed.ranks:
        free = room(subject, assumed, ranks)
        for context in (8192, 32768):
            counts = [users(subject, assumed, ranks, cache, context) for cache in CACHES]
            lines.append(
                [
                    str(ranks),
                    f"{subject.rank_bytes(ranks) / GIB:.1f} GiB",
                    f"{free / GIB:.1f} GiB" if free > 0 else "none",
                    f"{context:,}",
                    *(f"{count:,}" for count in counts),
                ]
            )
    header = ["GPUs", "weights each", "left each", "tokens of context"]
    return markdown_table([*header, *CACHES], lines)


def of_a_step(subject: Subject, assumed: Assumed) -> str:
    """Return the bound of a decode step with as many users as fit, on the largest group."""
    ranks, context = max(assumed.ranks), 8192
    name, link = assumed.links[0]
    lines = []
    for cache in CACHES:
        count = users(subject, assumed, ranks, cache, context)
        weights = subject.read_bytes(ranks) / assumed.bandwidth
        caches = count * subject.sizes(cache, context, ranks).sequence / assumed.bandwidth
        computed = subject.footprint.step_weight_bytes * count / ranks / assumed.products
        sent = subject.link_bytes(ranks, count, count) / link
        step = max(weights + caches, computed) + sent
        cells = (weights, caches, computed, sent, step)
        lines.append(
            [
                cache,
                f"{count:,}",
                *(f"{1e3 * seconds:.1f} ms" for seconds in cells),
                f"{count / step if count else 0:,.0f}",
                f"{1 / step:.0f}",
            ]
        )
    header = ["cache", "users", "weights read", "caches read", "products", "sent", "step"]
    return markdown_table([*header, "tokens/s", "of each user"], lines)


def of_the_links(subject: Subject, assumed: Assumed) -> str:
    """Bytes that each rank sends, and how long that takes at least."""
    lines = []
    for ranks in assumed.ranks:
        steps = [(f"a step of {rows}", rows, rows) for rows in BATCHES]
        for forward, tokens, rows in [*steps, ("2,048 tokens of a prompt", 2048, 1)]:
            sent = subject.link_bytes(ranks, tokens, rows)
            times = [f"{1e3 * sent / speed:.2f} ms" for _, speed in assumed.links]
            lines.append([str(ranks), forward, f"{sent / 1e6:,.1f} MB", *times])
    return markdown_table(
        ["ranks", "forward", "sent by each", *(name for name, _ in assumed.links)], lines
    )


def of_many_users(subject: Subject, assumed: Assumed) -> str:
    """Rows and machines for very many users."""
    ranks, context = max(assumed.ranks), 8192
    hold = assumed.answer / assumed.pace
    tokens = assumed.question + assumed.answer
    busy = tokens * subject.footprint.step_weight_bytes / ranks / assumed.products
    lines = []
    for count in USERS:
        load = count * hold / (hold + assumed.pause)
        rows = rows_needed(load, hold, assumed.patience, assumed.unlucky)
        machines = []
        for cache in CACHES:
            each = users(subject, assumed, ranks, cache, context)
            machines.append(f"{math.ceil(rows / each):,}" if each else "none fits")
        machines.append(f"{math.ceil(load / hold * busy):,}")
        lines.append([f"{count:,}", f"{load / hold:,.1f}", f"{load:,.0f}", f"{rows:,}", *machines])
    header = ["users", "requests/s", "under way", "rows", *(f"rows: {cache}" for cache in CACHES)]
    return markdown_table([*header, "products"], lines)


PARTS: dict[str, Callable[[Subject, Assumed], str]] = {
    "of-a-user": of_a_user,
    "of-a-machine": of_a_machine,
    "of-a-step": of_a_step,
    "of-the-links": of_the_links,
    "of-many-users": of_many_users,
}


def llama_70b() -> Subject:
    """Llama 3.1 70B by its published sizes."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )
    return Subject(config, "Llama 3.1 70B")


def filled(page: str) -> str:
    """Put the tables between their marks in a page."""
    subject, assumed = llama_70b(), Assumed()

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- {name}:start -->\n{PARTS[name](subject, assumed)}<!-- {name}:end -->"

    return re.sub(r"<!-- ([a-z-]+):start -->.*?<!-- \1:end -->", fill, page, flags=re.S)


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="fill docs/results/scaling.md")
    parser.add_argument("--model", help="a folder with a config.json; default: Llama 3.1 70B")
    parser.add_argument("--memory", type=float, default=80.0, help="GiB of one GPU")
    parser.add_argument("--ranks", default="2,4,8", help="sizes of a tensor parallel group")
    args = parser.parse_args()
    if args.write:
        if len(sys.argv) > 2:
            parser.error("the page's tables are those of the defaults; give --write alone")
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    subject = llama_70b()
    if args.model:
        subject = Subject(AutoConfig.from_pretrained(args.model), args.model)
    ranks = tuple(int(number) for number in args.ranks.split(","))
    assumed = Assumed(memory=args.memory * GIB, ranks=ranks)
    print(f"{subject.name}, bf16\n")
    for name, make in PARTS.items():
        print(f"{name}\n\n{make(subject, assumed)}\n")


if __name__ == "__main__":
    main()
