"""What a large model on several machines and very many users need, by arithmetic alone.

    python benchmarks/scaling_arithmetic.py            prints the tables
    python benchmarks/scaling_arithmetic.py --write    puts them into docs/scaling.md
    python benchmarks/scaling_arithmetic.py --model DIR --memory 24 --ranks 1,2,4

Bytes of weights and caches are counted from the model's config, as `h2okv bench` counts them;
machines and users are assumptions, named below and in the page. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from h2okv.benchmarking.footprint import Footprint, footprint_of

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
GIB, MIB = 2**30, 2**20
CONTEXTS = (4096, 8192, 32768, 131072)
CACHES = ("full", "20 %", "10 %", "2,048 entries")
BATCHES = (1, 64, 256)
USERS = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Assumed:
    """Machines and users, none of them measured.

    Attributes:
        memory: Of one GPU, bytes.
        used: Share of it that may be taken.
        beside: Bytes of one GPU for libraries, temporaries and the block of a prompt being read.
        bandwidth: Of its memory, bytes in a second.
        products: Of one GPU in practice, operations in a second.
        links: Bytes in a second and direction between two ranks, by name.
        ranks: Sizes of a tensor parallel group.
        pause: Seconds in which a user reads and thinks between an answer and the next question.
        answer: New tokens of an answer.
        pace: New tokens of one answer in a second.
        patience: Seconds that a request may wait for a row.
        unlucky: Share of the requests that may wait longer.
    """

    memory: float = 80 * GIB
    used: float = 0.9
    beside: float = 6 * GIB
    bandwidth: float = 3.35e12
    products: float = 4e14
    links: tuple[tuple[str, float], ...] = (
        ("within a machine, 450 GB/s", 450e9),
        ("400 Gb/s", 50e9),
        ("100 Gb/s", 12.5e9),
    )
    ranks: tuple[int, ...] = (2, 4, 8)
    pause: float = 60.0
    answer: int = 300
    pace: float = 20.0
    patience: float = 1.0
    unlucky: float = 0.01


class Subject:
    """A model whose weights are counted and never made.

    Args:
        config: Its config.
        name: Its name.
    """

    def __init__(self, config: PreTrainedConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.footprint: Footprint = footprint_of(config, torch.bfloat16)

    @cached_property
    def _parameters(self) -> list[tuple[int, bool]]:
        """Bytes of each parameter, and whether transformers' plan splits it."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        plan = model.tp_plan
        return [
            (parameter.nbytes, re.sub(r"\.\d+(?=\.)", ".*", name).rsplit(".", 1)[0] in plan)
            for name, parameter in model.named_parameters()
        ]

    def rank_bytes(self, ranks: int) -> float:
        """Weights of one rank; what the plan does not split is on every rank."""
        return sum(size / (ranks if split else 1) for size, split in self._parameters)

    def user_bytes(self, cache: str, context: int) -> float:
        """One user's keys and values, with H2O's scores and positions, on all ranks together."""
        if cache == "full":
            return self.footprint.full_bytes(1, context)
        return self.footprint.h2o_bytes(1, entries_of(cache, context) + 1, context)

    def link_bytes(self, ranks: int, tokens: int, rows: int) -> float:
        """What each rank sends in one forward: two all-reduced states a layer, and the logits.

        A ring sends ``2 (n - 1) / n`` times a state that is summed, ``(n - 1) / n`` times one that
        is only gathered.
        """
        text = self.config.get_text_config()
        summed = 2 * text.num_hidden_layers * tokens * text.hidden_size * 2
        gathered = rows * text.vocab_size * 2
        return (2 * summed + gathered) * (ranks - 1) / ranks


def entries_of(cache: str, context: int) -> int:
    """The entries that a budget keeps of a context."""
    number, unit = cache.split(" ", 1)
    value = int(number.replace(",", ""))
    return value * context // 100 if unit == "%" else min(value, context)


def room(subject: Subject, assumed: Assumed, ranks: int) -> float:
    """Bytes for caches on one GPU; less than 0 where not even the weights fit."""
    return assumed.memory * assumed.used - assumed.beside - subject.rank_bytes(ranks)


def users(subject: Subject, assumed: Assumed, ranks: int, cache: str, context: int) -> int:
    """Users of one group of ranks; each rank holds its share of the KV heads."""
    each = subject.user_bytes(cache, context) / ranks
    return max(0, int(room(subject, assumed, ranks) // each))


def rows_needed(load: float, hold: float, patience: float, unlucky: float) -> int:
    """The fewest rows with which few requests wait long (Erlang's C formula, M/M/c).

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


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Writes a table."""
    head = list(header)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of_a_user(subject: Subject, assumed: Assumed) -> str:
    """Bytes of one user's cache."""
    lines = []
    for context in CONTEXTS:
        sizes = [subject.user_bytes(cache, context) / MIB for cache in CACHES]
        lines.append([f"{context:,}", *(f"{size:,.0f} MiB" for size in sizes)])
    return markdown(["tokens of context", *CACHES], lines)


def of_a_machine(subject: Subject, assumed: Assumed) -> str:
    """Users of one group of GPUs."""
    lines = []
    for ranks in assumed.ranks:
        free = room(subject, assumed, ranks)
        for context in (8192, 32768):
            found = [users(subject, assumed, ranks, cache, context) for cache in CACHES]
            lines.append(
                [
                    str(ranks),
                    f"{subject.rank_bytes(ranks) / GIB:.1f} GiB",
                    f"{free / GIB:.1f} GiB" if free > 0 else "none",
                    f"{context:,}",
                    *(f"{count:,}" for count in found),
                ]
            )
    header = ["GPUs", "weights each", "for caches each", "tokens of context"]
    return markdown([*header, *CACHES], lines)


def of_a_step(subject: Subject, assumed: Assumed) -> str:
    """The bound of a decode step with as many users as fit, on the largest group."""
    ranks, context = max(assumed.ranks), 8192
    name, link = assumed.links[0]
    lines = []
    for cache in CACHES:
        count = users(subject, assumed, ranks, cache, context)
        weights = subject.rank_bytes(ranks) / assumed.bandwidth
        caches = count * subject.user_bytes(cache, context) / ranks / assumed.bandwidth
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
    return markdown([*header, "tokens/s", "of each user"], lines)


def of_the_links(subject: Subject, assumed: Assumed) -> str:
    """Bytes that each rank sends, and how long that takes at least."""
    lines = []
    for ranks in assumed.ranks:
        steps = [(f"a step of {rows}", rows, rows) for rows in BATCHES]
        for what, tokens, rows in [*steps, ("2,048 tokens of a prompt", 2048, 1)]:
            sent = subject.link_bytes(ranks, tokens, rows)
            times = [f"{1e3 * sent / speed:.2f} ms" for _, speed in assumed.links]
            lines.append([str(ranks), what, f"{sent / 1e6:,.1f} MB", *times])
    return markdown(
        ["ranks", "forward", "sent by each", *(name for name, _ in assumed.links)], lines
    )


def of_many_users(subject: Subject, assumed: Assumed) -> str:
    """Rows and machines for very many users."""
    ranks, context = max(assumed.ranks), 8192
    hold = assumed.answer / assumed.pace
    lines = []
    for count in USERS:
        load = count * hold / (hold + assumed.pause)
        rows = rows_needed(load, hold, assumed.patience, assumed.unlucky)
        groups = []
        for cache in CACHES:
            each = users(subject, assumed, ranks, cache, context)
            groups.append(f"{math.ceil(rows / each):,}" if each else "none fits")
        lines.append([f"{count:,}", f"{load / hold:,.1f}", f"{load:,.0f}", f"{rows:,}", *groups])
    header = ["users", "requests/s", "under way", "rows"]
    return markdown([*header, *(f"machines, {cache}" for cache in CACHES)], lines)


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
    """Puts the tables between their marks in a page."""
    subject, assumed = llama_70b(), Assumed()

    def fill(found: re.Match[str]) -> str:
        name = found.group(1)
        return f"<!-- {name}:start -->\n{PARTS[name](subject, assumed)}\n<!-- {name}:end -->"

    return re.sub(r"<!-- ([a-z-]+):start -->.*?<!-- \1:end -->", fill, page, flags=re.S)


def main() -> None:
    """Prints the tables, or writes them into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
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
