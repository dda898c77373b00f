"""Time to first token and memory of conversations that the engine continues from saved states.

``turn`` reads a first turn of 4,096 tokens, answers, and times the second turn's first token with
and without automatic prefix caching. ``loop`` is an agent's conversation that grows with every
turn, beside a `DynamicCache` of transformers that is held from turn to turn; the engine without
states, which reads everything again, joins every fifth turn. ``state`` reports a state's size by
the length of its text, ``step`` the time of a decode step with ``evict_every`` against a static
cache of as many slots and against the default. Texts are this package's source code. In fp32 every
answer must equal that of the engine without states, or the run ends without a figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import (
    RESULTS,
    Target,
    environment,
    interleave,
    load_pair,
    progress,
    report,
    rows_for,
    with_h2o,
)
from transformers import DynamicCache, PreTrainedModel

import h2okv
from h2okv.benchmarking.caches import CacheSpec, stored_bytes
from h2okv.cache.argument import CACHE
from h2okv.config import CacheConfig
from h2okv.engine.outputs import OutputDelta
from h2okv.integration.loading import describe
from h2okv.plots import COLOURS, MARKERS, new_figure, save_figure
from h2okv.records import read_csv

CSV = RESULTS / "prefix_caching.csv"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEASURES = ("turn", "loop", "state", "step")
FIRST_TOKEN_LIMIT, CACHED_LIMIT, STEP_LIMIT = 0.2, 0.9, 1.03
ANSWER, MESSAGE = 32, 128  # tokens of an answer, and of a user's second message
COLD_EVERY = 5  # turns of a loop
LOOP = "agent turn, first token"
STATES, COLD, DYNAMIC = "states", "no states", "dynamic"


def source_tokens(tokenizer: Any, count: int) -> list[int]:
    """Return tokens of this package's source code."""
    files = sorted(Path(h2okv.__file__).parent.rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)[: 8 * count]
    return tokenizer(text, add_special_tokens=False).input_ids[:count]


class Engine:
    """An `LLM` for one conversation at a time."""

    def __init__(
        self, plain: PreTrainedModel, tokenizer: Any, args: argparse.Namespace,
        budget: int, prefix_cache: int | None,
    ) -> None:  # fmt: skip
        cache = CacheConfig.from_budget(budget, evict_every=args.evict_every)
        context = plain.config.max_position_embeddings
        self.llm = h2okv.LLM(
            with_h2o(plain), tokenizer, cache=cache, max_num_seqs=1,
            max_prompt_tokens=context, prefix_cache=prefix_cache,
        )  # fmt: skip

    def ask(self, tokens: Sequence[int], answer: int = 1) -> tuple[float, list[int], int]:
        """Return the seconds to the first token, the answer, and the reused tokens."""
        engine, events, times = self.llm.engine, [], []

        def notify(event: Any) -> None:
            times.append(time.perf_counter())
            events.append(event)

        params = h2okv.SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        engine.scheduler.submit(engine.request(tokens, params, notify))
        while engine.step():
            pass
        deltas = [event for event in events if isinstance(event, OutputDelta)]
        assert deltas[0].prompt is not None
        token_ids = [token for delta in deltas for token in delta.token_ids]
        return times[0] - start, token_ids, deltas[0].prompt.num_reused


def check_equal(dtype: str, token_ids: list[int], cold: list[int]) -> None:
    """End the run if a state has changed an answer; bf16 may round a tie differently."""
    if dtype == "fp32" and token_ids != cold:
        raise SystemExit(f"a state changed the answer: {token_ids} and not {cold}")


def measure_turn(plain: PreTrainedModel, tokenizer: Any, args: Any, setting: Any) -> list[Any]:
    """Time the first token of second turns that differ in their message alone."""
    states, cold = (Engine(plain, tokenizer, args, args.budget, size) for size in (None, 0))
    size = args.first_turn + args.rounds * MESSAGE
    tokens = source_tokens(tokenizer, size)
    first = tokens[: args.first_turn]
    _, answer, _ = states.ask(first, ANSWER)
    seconds: dict[str, list[float]] = {STATES: [], COLD: []}
    shares = []
    for number in range(args.rounds):
        progress(f"second turn: round {number + 1} of {args.rounds}")
        message = tokens[args.first_turn + number * MESSAGE :][:MESSAGE]
        prompt = [*first, *answer, *message]
        seconds_to_first, token_ids, num_reused = states.ask(prompt)
        other, expected, _ = cold.ask(prompt)
        check_equal(setting["dtype"], token_ids, expected)
        seconds[STATES].append(seconds_to_first)
        seconds[COLD].append(other)
        shares.append(num_reused / len(prompt))
    progress("")
    setting = setting | {"prompt": len(prompt), "budget": args.budget}
    targets = [Target(COLD, FIRST_TOKEN_LIMIT)]
    rows = rows_for("second turn, first token", "s", seconds, targets, setting, STATES)
    cached = rows_for("second turn, cached tokens", "", {STATES: shares}, [], setting, STATES)
    is_met = statistics.median(shares) >= CACHED_LIMIT
    cached[0] |= {"target": f">= {CACHED_LIMIT}", "met": "yes" if is_met else "no"}
    return rows + cached


@torch.no_grad()
def read_on(model: PreTrainedModel, cache: DynamicCache, tokens: Sequence[int]) -> None:
    """Read what a full cache has not read of a conversation, up to its next token."""
    ids = torch.tensor([tokens[cache.get_seq_length() :]])
    model(ids, **{CACHE: cache}, logits_to_keep=1).logits[0, -1].argmax().item()


def measure_loop(plain: PreTrainedModel, tokenizer: Any, args: Any, setting: Any) -> list[Any]:
    """Let a conversation grow; a row for each turn and each way to hold it."""
    limit = args.prefix_cache << 20
    states = Engine(plain, tokenizer, args, args.loop_budget, limit)
    cold = Engine(plain, tokenizer, args, args.loop_budget, 0)
    full = DynamicCache(config=plain.config)
    added = args.loop_tokens // args.turns - ANSWER
    source = source_tokens(tokenizer, args.turns * added)
    prompt: list[int] = []
    rows = []
    for turn in range(1, args.turns + 1):
        progress(f"agent turn {turn} of {args.turns}")
        prompt += source[(turn - 1) * added : turn * added]
        seconds_to_first, answer, _ = states.ask(prompt, ANSWER)
        start = time.perf_counter()
        read_on(plain, full, prompt)
        seconds = {STATES: [seconds_to_first], DYNAMIC: [time.perf_counter() - start]}
        if turn == 1 or turn % COLD_EVERY == 0:
            other, expected, _ = cold.ask(prompt)
            check_equal(setting["dtype"], answer[:1], expected)
            seconds[COLD] = [other]
        stats = states.llm.stats()
        mebibytes = {
            STATES: [(stats.reserved_bytes + stats.prefix_bytes) / 2**20],
            DYNAMIC: [stored_bytes(full) / 2**20],
        }
        row = setting | {"prompt": len(prompt), "budget": args.loop_budget}
        rows += rows_for(LOOP, "s", seconds, [], row)
        rows += rows_for("agent turn, memory", "MiB", mebibytes, [], row)
        prompt += answer
    progress("")
    return rows


def measure_states(plain: PreTrainedModel, tokenizer: Any, args: Any, setting: Any) -> list[Any]:
    """Report the mean bytes of the states that texts of several lengths leave."""
    rows = []
    for length in args.state_tokens:
        engine = Engine(plain, tokenizer, args, args.budget, None)
        engine.ask(source_tokens(tokenizer, length))
        stats = engine.llm.stats()
        samples = {
            STATES: [stats.prefix_bytes / stats.prefix_states / 2**20],
            "slots": [stats.reserved_bytes / 2**20],  # K + c of one sequence
        }
        row = setting | {"prompt": length, "budget": args.budget}
        rows += rows_for("a state", "MiB", samples, [Target("slots", 1.0)], row, STATES)
    return rows


def measure_step(
    plain: PreTrainedModel, h2o_model: PreTrainedModel, args: Any, setting: Any
) -> list[Any]:
    """Time steps of one sequence, one by one and by whole spans, which have an eviction each."""
    tokens = 4 * args.evict_every
    spec = partial(CacheConfig.from_budget, args.budget)
    slots = args.budget + args.evict_every
    runners = {
        "h2o": CacheSpec("h2o", spec(evict_every=args.evict_every)).runner(h2o_model),
        "static": CacheSpec("static", CacheConfig.from_budget(slots - 1)).runner(plain),
        "default": CacheSpec("h2o", spec()).runner(with_h2o(plain)),
    }
    ids = torch.randint(plain.config.vocab_size, (1, tokens))
    for runner in runners.values():
        runner.prepare(tokens)
        runner.prefill(ids)
    runs = {name: partial(runner.step, ids[:, :1]) for name, runner in runners.items()}
    seconds = interleave(runs, args.steps, 8, "steps")
    span = min(args.evict_every, args.steps)
    spans = {
        name: [sum(each[n : n + span]) for n in range(0, len(each) - span + 1, span)]
        for name, each in seconds.items()
    }
    row = setting | {"prompt": tokens, "budget": args.budget}
    targets = [Target("static", STEP_LIMIT), Target("default")]
    rows = rows_for("step", "s", seconds, targets, row)
    return rows + rows_for(f"{span} steps", "s", spans, targets, row)


def plot(path: Path, csv: Path) -> None:
    """Draw the newest loop of a CSV: time to first token, and memory, by length."""
    rows = [row for row in read_csv(csv) if row["measure"].startswith("agent turn")]
    figure = new_figure(9, 3.6)
    panels = {LOOP: "time to first token, s", "agent turn, memory": "cache, MiB"}
    labels = {STATES: "H2O with states", COLD: "H2O without states", DYNAMIC: "full cache, held"}
    for axes, (measure, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for number, (name, label) in enumerate(labels.items()):
            # A later run of the same length replaces the earlier one.
            points = {
                int(row["prompt"]): float(row["median"])
                for row in rows
                if (row["measure"], row["implementation"]) == (measure, name)
            }
            style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 4}
            if points:
                axes.plot(*zip(*sorted(points.items()), strict=True), label=label, **style)
        axes.set(xlabel="tokens of the conversation", ylabel=title)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    save_figure(figure, path)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/prefix_caching.py --measures turn step --rounds 5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--model", default="smollm2", help="of all measures but loop")
    parser.add_argument("--loop-model", default="smollm2", help="a folder or GGUF file")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--evict-every", type=int, default=256)
    parser.add_argument("--budget", type=int, default=205, help="entries, of all but loop")
    parser.add_argument("--first-turn", type=int, default=4096, help="tokens of a first turn")
    parser.add_argument("--rounds", type=int, default=5, help="second turns")
    parser.add_argument("--turns", type=int, default=20, help="turns of a loop")
    parser.add_argument("--loop-tokens", type=int, default=8000, help="tokens at its end")
    parser.add_argument("--loop-budget", type=int, default=512, help="entries")
    parser.add_argument("--prefix-cache", type=int, default=64, help="MiB of a loop's states")
    parser.add_argument("--state-tokens", type=numbers, default=[512, 2048, 8000])
    parser.add_argument("--steps", type=int, default=512, help="steps of each cache")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=CSV, help="file to add rows to")
    parser.add_argument("--plot", type=Path, help="draw the CSV's loop, measure nothing")
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    args = parse()
    if args.plot:
        plot(args.plot, args.csv)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    for dtype in args.dtypes:
        for measure in args.measures:
            name = args.loop_model if measure == "loop" else args.model
            plain, h2o_model = load_pair(name, DTYPES[dtype])
            setting = environment() | {
                "model": Path(name).name, "dtype": dtype, "batch": 1,
                "kv_heads": plain.config.num_key_value_heads,
            }  # fmt: skip
            if measure == "step":
                report(args.csv, measure_step(plain, h2o_model, args, setting))
                continue
            run = {"turn": measure_turn, "loop": measure_loop, "state": measure_states}[measure]
            report(args.csv, run(plain, describe(name).tokenizer, args, setting))


if __name__ == "__main__":
    main()
