"""Time to first token and memory of conversations that the engine continues from saved states.

``turn`` reads a first turn of 4,096 tokens, answers, and times the second turn's first token with
and without automatic prefix caching. ``fuzz`` compares the answers of many short conversations,
with shared beginnings, edits, other orders and disconnected clients, with those of an engine
without states. ``state`` reports a state's size by the length of its text, ``step`` the time of a
decode step with ``evict_every`` against a static cache of as many slots and against the default.
Texts are this package's source code. In fp32 every answer must equal that of the engine without
states, or the run ends without a figure. agent_loop.py measures a conversation that grows.
"""

from __future__ import annotations

import argparse
import random
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
from transformers import PreTrainedModel

import h2okv
from h2okv.config import CacheConfig
from h2okv.engine.outputs import OutputDelta
from h2okv.models.loading import describe
from h2okv_lab.benchmarking.caches import CacheSpec

CSV = RESULTS / "prefix_caching.csv"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEASURES = ("turn", "fuzz", "state", "step")
FIRST_TOKEN_LIMIT, CACHED_LIMIT, STEP_LIMIT = 0.2, 0.9, 1.03
ANSWER, MESSAGE = 32, 128  # tokens of an answer, and of a user's second message
STATES, COLD = "states", "no states"


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
        cache = CacheConfig(budget=budget, min_tokens=0, evict_every=args.evict_every)
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


class Fuzz:
    """Draws conversations: shared beginnings, later turns, edits in the middle, cut ones."""

    def __init__(self, tokens: Sequence[int], longest: int, seed: int) -> None:
        self.rng, self.longest = random.Random(seed), longest
        self._tokens, self._texts = tokens, [list(tokens[n : n + 50]) for n in (0, 60, 120)]
        self.num_begun = 0

    def prompts(self) -> list[list[int]]:
        """Return up to four prompts, to be sent together."""
        return [self._prompt() for _ in range(self.rng.randint(1, 4))]

    def _prompt(self) -> list[int]:
        rng = self.rng
        text = list(rng.choice(self._texts[-40:] if rng.random() < 0.7 else self._texts[:3]))
        kind = rng.choice(("later turn", "edited", "cut", "shared beginning"))
        if kind == "edited":
            text[rng.randrange(len(text))] = rng.choice(self._tokens)
        elif kind == "cut":
            text = text[: rng.randint(1, len(text))]
        elif kind == "shared beginning":
            text = list(rng.choice(self._texts[:3]))
        self.num_begun += kind != "later turn"
        start = rng.randrange(len(self._tokens) - 40)
        text += self._tokens[start : start + rng.randint(1, 40)]
        return text[: self.longest]

    def add(self, text: list[int]) -> None:
        """Note a prompt with its answer, which later ones may continue."""
        if len(text) < self.longest - 40:
            self._texts.append(text)


def measure_fuzz(plain: PreTrainedModel, tokenizer: Any, args: Any, setting: Any) -> list[Any]:
    """Compare the answers of many conversations with those of an engine without states."""
    longest, end = 6 * args.evict_every, time.monotonic() + 60 * args.minutes
    cache = CacheConfig(budget=args.budget, min_tokens=0, evict_every=args.evict_every)
    states, cold = (
        h2okv.LLM(
            with_h2o(plain), tokenizer, cache=cache, max_num_seqs=3, max_prompt_tokens=longest,
            max_prefill_tokens=args.evict_every, prefix_cache=size,
        )
        for size in (args.prefix_cache << 20, 0)
    )  # fmt: skip
    fuzz = Fuzz(source_tokens(tokenizer, 20_000), longest, args.seed)
    are_equal: list[float] = []
    aborted = 0
    while fuzz.num_begun < args.conversations and time.monotonic() < end:
        progress(f"conversations: {fuzz.num_begun} of {args.conversations}")
        prompts = fuzz.prompts()
        params = h2okv.SamplingParams(
            max_tokens=fuzz.rng.randint(1, 24), temperature=0, ignore_eos=True
        )
        if fuzz.rng.random() < 0.3:  # a client that disconnects
            engine, aborted = states.engine, aborted + 1
            request = engine.request(fuzz.rng.choice(prompts), params, lambda event: None)
            engine.scheduler.submit(request)
            for _ in range(fuzz.rng.randint(1, 6)):
                engine.step()
            engine.abort(request)
        order = fuzz.rng.sample(range(len(prompts)), len(prompts))
        answers = states.generate([prompts[n] for n in order], params, show_progress=False)
        expected = cold.generate(prompts, params, show_progress=False)
        for number, answer in zip(order, answers, strict=True):
            token_ids = list(answer.completions[0].token_ids)
            other = list(expected[number].completions[0].token_ids)
            are_equal.append(float(token_ids == other))
            if token_ids != other:
                progress("")
                print(f"differs: {token_ids} and not {other} after {prompts[number]}")
            fuzz.add([*prompts[number], *other])
    progress("")
    stats = states.stats()
    print(
        f"{fuzz.num_begun} conversations, {len(are_equal)} requests and {aborted} aborted ones;"
        f" {stats.prefix_hits} hits, {stats.prefix_evictions} states evicted"
    )
    row = setting | {"prompt": longest, "budget": args.budget}
    share = stats.reused_tokens / (stats.reused_tokens + stats.prompt_tokens)
    rows = rows_for("fuzzed requests, tokens equal", "", {STATES: are_equal}, [], row, STATES)
    rows[0] |= {"target": "all", "met": "yes" if all(are_equal) else "no"}
    begun = {STATES: [float(fuzz.num_begun)]}
    rows += rows_for("fuzzed conversations", "", begun, [], row, STATES)
    return rows + rows_for("fuzzed requests, cached tokens", "", {STATES: [share]}, [], row, STATES)


def measure_states(plain: PreTrainedModel, tokenizer: Any, args: Any, setting: Any) -> list[Any]:
    """Report the mean bytes of the states that texts of several lengths leave."""
    rows = []
    for length in args.state_tokens:
        engine = Engine(plain, tokenizer, args, args.budget, None)
        engine.ask(source_tokens(tokenizer, length))
        stats = engine.llm.stats()
        if not stats.prefix_states:
            least = args.evict_every
            raise SystemExit(f"--state-tokens {length} leaves no state; give {least} or more")
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
    spec = partial(CacheConfig, budget=args.budget)
    slots = args.budget + args.evict_every
    runners = {
        "h2o": CacheSpec("h2o", spec(evict_every=args.evict_every)).runner(h2o_model),
        "static": CacheSpec("static", CacheConfig(budget=slots - 1)).runner(plain),
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


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/prefix_caching.py --measures turn step --rounds 5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--model", default="smollm2", help="a folder, GGUF file or known name")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--evict-every", type=int, default=256)
    parser.add_argument("--budget", type=int, default=205, help="entries")
    parser.add_argument("--first-turn", type=int, default=4096, help="tokens of a first turn")
    parser.add_argument("--rounds", type=int, default=5, help="second turns")
    parser.add_argument("--conversations", type=int, default=1000, help="that fuzz begins")
    parser.add_argument("--minutes", type=float, default=60, help="most of fuzz")
    parser.add_argument("--prefix-cache", type=int, default=64, help="MiB of fuzz's states")
    parser.add_argument("--seed", type=int, default=0, help="of fuzz")
    parser.add_argument("--state-tokens", type=numbers, default=[512, 2048, 8000])
    parser.add_argument("--steps", type=int, default=512, help="steps of each cache")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=CSV, help="file to add rows to")
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    for dtype in args.dtypes:
        for measure in args.measures:
            name = args.model
            plain, h2o_model = load_pair(name, DTYPES[dtype])
            setting = environment() | {
                "model": Path(name).name, "dtype": dtype, "batch": 1,
                "kv_heads": plain.config.num_key_value_heads,
            }  # fmt: skip
            if measure == "step":
                report(args.csv, measure_step(plain, h2o_model, args, setting))
                continue
            run = {
                "turn": measure_turn,
                "fuzz": measure_fuzz,
                "state": measure_states,
            }[measure]
            report(args.csv, run(plain, describe(name).tokenizer, args, setting))


if __name__ == "__main__":
    main()
