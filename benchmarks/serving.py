"""Serving many users: h2okv's engine beside transformers' continuous batching with a full cache.

Two models in fp32. The bundled one has real text of 1,024 to 1,792 tokens (its window of 2,048 must
hold the answer too), drawn evenly, and answers from a log-normal distribution. A Llama with random
weights (12 layers, hidden 768, 12 heads of 64, MLP of 3,072, vocabulary 32,000: the shape of
cpu_generate.py) has random tokens, 2,048 to 4,096. All contestants get the same requests, go on
past end tokens, and take turns, each run in a process of its own; medians count.

First of all, greedy tokens of the engine with a budget that holds everything must be those of
transformers' own `generate`; there is no figure without that. Then:

- seconds for each new token, with many clients: h2o against continuous batching (the target is
  twice its tokens/s), with all clients in its batch and with only --at-once of them, and against
  one request after another (with few requests, as it has no use for clients). Of the bundled model
  the whole load counts, prompts included. Of the shape only steps do, while all users are under
  way, with prompts of four lengths, each of which goes on in as many outputs as make up the
  clients: on a CPU transformers multiplies each token of a prompt with the keys of all users, so
  that reading 32 such prompts takes longer than all the rest (--parts shape-load does it);
- bytes of cache for each user: a row, against the blocks of the same requests when they end (the
  target is a quarter, so that four times as many users fit in equal memory);
- what the process takes beside the model at most, for each user, by the system's own count;
- seconds from one token of an answer to the next on average, 95th percentile of the answers, with
  many clients against few (the target is at most twice as long).

--parts http asks real servers over HTTP: `h2okv bench serve` with `h2okv serve`, `transformers
serve --continuous-batching` and `transformers serve`, on the bundled model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from record import Target, environment, progress, report, rows_for

CHILD = Path(__file__).with_name("serving_child.py")
RESULTS = Path(__file__).parent / "results" / "serving.csv"
SHARE = 0.2
PROMPTS = 4
MOST_STEPS = 2000
CHECK = {"context": [96, 320], "new_tokens": 24, "spread": 0.0}


def settings_of(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the runs of one model share."""
    mix = {"new_tokens": args.new, "spread": 0.5, "longest": 2 * args.new, "seed": 1}
    common = {
        "threads": args.threads, "batch_tokens": args.batch_tokens, "copies": 1, "steps": 0,
        "at_once": None, "half": SHARE / 2, "tells_tokens": False, "answer": None,
    }  # fmt: skip
    if part == "bundled":
        return {
            **common, "model": "bundled", "mix": {**mix, "context": args.bundled_context},
            "kv_heads": 2, "each": args.each, "rounds": args.rounds, "own_rounds": 0,
        }  # fmt: skip
    hidden, kv_heads = 64 * args.heads, args.kv_heads or args.heads
    shape = {
        "vocab_size": args.vocabulary, "hidden_size": hidden, "num_hidden_layers": args.layers,
        "intermediate_size": 4 * hidden, "num_attention_heads": args.heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 32768,
    }  # fmt: skip
    return {
        **common, "model": f"llama-{args.layers}x{hidden}-{4 * hidden}", "shape": shape,
        "mix": {**mix, "context": args.shape_context}, "kv_heads": kv_heads, "each": 1,
        "rounds": args.shape_rounds, "own_rounds": args.own_rounds,
    }  # fmt: skip


def run(setting: dict[str, Any], kind: str, clients: int, label: str, **other: Any) -> Any:
    """Runs one contestant in a process of its own."""
    progress(f"{setting['model']}, {label}: {kind}, {clients} clients")
    requests = clients * setting["each"]
    told = {"requests": requests, **setting, "kind": kind, "clients": clients, **other}
    done = subprocess.run(
        [sys.executable, str(CHILD)], input=json.dumps(told), capture_output=True, text=True
    )
    if done.returncode:
        progress("")
        raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check(setting: dict[str, Any], args: argparse.Namespace) -> None:
    """Ends the run if the engine does not say what `generate` says, with everything kept."""
    mix = {**setting["mix"], **CHECK}
    few = {
        "requests": args.check_requests, "tells_tokens": True, "mix": mix, "half": None,
        "steps": 0, "copies": 1, "answer": None,
    }  # fmt: skip
    clients = max(2, args.check_requests // 2)
    expected = run(setting, "sequential", clients, "check", **few)["tokens"]
    for kind in ("h2okv", "transformers"):
        tokens = run(setting, kind, clients, "check", **few)["tokens"]
        same = sum(one == two for one, two in zip(tokens, expected, strict=True))
        progress("")
        print(f"{setting['model']}: {kind} equals generate in {same} of {len(expected)} answers")
        if kind == "h2okv" and same < len(expected):
            raise SystemExit("the engine differs from generate: nothing was timed")


def measure(part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All figures of one model."""
    setting = settings_of(part, args)
    check(setting, args)
    few, many = args.clients
    small = f"transformers, {args.at_once} at once"
    one: dict[str, Any] = {"requests": args.sequential}
    runs: dict[str, tuple[str, int, dict[str, Any]]] = {
        "h2o": ("h2okv", many, {}),
        "transformers": ("transformers", many, {}),
        f"h2o, {few} clients": ("h2okv", few, {}),
        small: ("transformers", many, {"at_once": args.at_once}),
        "sequential": ("sequential", many, one),
    }
    if part == "shape":
        # What one request after another takes for a token has no prompts in it either way.
        del runs[small], runs["sequential"]
        for name, (kind, clients, _) in runs.items():
            few_prompts = {
                "requests": PROMPTS, "copies": clients // PROMPTS, "steps": args.steps,
                "answer": args.new, "most": MOST_STEPS,
            }  # fmt: skip
            runs[name] = (kind, clients, few_prompts)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for number in range(setting["rounds"]):
        names = list(runs) if number % 2 == 0 else list(reversed(runs))
        for name in names:
            kind, clients, other = runs[name]
            label = f"round {number + 1} of {setting['rounds']}"
            result = run(setting, kind, clients, label, **other)
            found[name].append(result)
            progress("")
            tell(setting["model"], name, result)
    for number in range(setting["rounds"], setting["own_rounds"]):
        for name, (kind, clients, other) in runs.items():
            if kind == "h2okv":
                label = f"alone, round {number + 1} of {setting['own_rounds']}"
                found[name].append(run(setting, kind, clients, label, **other))
                progress("")
                tell(setting["model"], name, found[name][-1])
    return rows_of(part, setting, found, few, many)


def tell(model: str, name: str, result: dict[str, Any]) -> None:
    """Prints one run."""
    print(
        f"{model} {name}: {result['new_tokens_per_second']:.1f} new tokens/s,"
        f" {result['seconds']:.1f} s; first token {result['first_token_p50']:.2f} s; per token"
        f" p50 {1e3 * result['per_token_p50']:.1f}, p95 {1e3 * result['per_token_p95']:.1f} ms;"
        f" gaps p95 {1e3 * result['gap_p95']:.1f}, p99 {1e3 * result['gap_p99']:.1f} ms",
        flush=True,
    )


def rows_of(
    part: str, setting: dict[str, Any], found: dict[str, list[dict[str, Any]]], few: int, many: int
) -> list[dict[str, Any]]:
    """The CSV rows of one model."""
    context = setting["mix"]["context"]
    told = {
        **environment(), "threads": setting["threads"], "model": setting["model"], "dtype": "fp32",
        "kv_heads": setting["kv_heads"], "prompt": f"{context[0]}:{context[1]}", "budget": SHARE,
        "batch": many,
    }  # fmt: skip
    what = "steps only" if part == "shape" else "prompts included"

    def of(value: Callable[[dict[str, Any]], float], *names: str) -> dict[str, list[float]]:
        chosen = names or [name for name in found if name == "h2o" or "h2o" not in name]
        # Further rounds of the engine alone count where it is compared with itself.
        rounds = min(len(found[name]) for name in chosen)
        return {name: [value(result) for result in found[name][:rounds]] for name in chosen}

    per_token = of(lambda r: 1 / r["new_tokens_per_second"])
    others = [name for name in per_token if name != "h2o"]
    targets = [Target(name, 2.0 if "transformers" in name else 1.0, True) for name in others]
    rows = rows_for(f"serving, {what}: s per new token", "s", per_token, targets, told)
    both = ("h2o", "transformers")
    users = of(lambda r: r["user_bytes"], *both)
    target = [Target("transformers", 4.0, True)]
    rows += rows_for("serving: cache of a user", "B", users, target, told)
    beside = of(lambda r: r["beside_model_bytes"] / many, *both)
    rows += rows_for("serving: peak beside the model, a user", "B", beside, [], told)
    smaller = f"h2o, {few} clients"
    for name, column in (("p95 time per token", "per_token_p95"), ("p95 gap", "gap_p95")):
        samples = of(itemgetter(column), "h2o", smaller)
        rows += rows_for(f"serving: {name}", "s", samples, [Target(smaller, 2.0)], told)
    if part != "shape":
        first = of(itemgetter("first_token_p50"), *both)
        rows += rows_for("serving: median first token", "s", first, [], told)
    return rows


def http(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Real servers on the bundled model, asked over HTTP."""
    setting = settings_of("bundled", args)
    low, high = setting["mix"]["context"]
    many = args.clients[1]
    options = f"--budget {SHARE} --max-num-seqs {many} --max-prompt-tokens {high + 16}"
    command = [
        sys.executable, "-m", "h2okv.cli", "bench", "serve", "--model", "bundled",
        "--against", "transformers,sequential", "--serve-options", options,
        "--clients", str(many), "--requests", str(many * setting["each"]),
        "--context", f"{low}:{high}", "--new-tokens", str(args.new), "--spread", "0",
        "--timeout", "3600", "--json",
    ]  # fmt: skip
    samples: dict[str, list[float]] = {"h2o": [], "transformers": [], "sequential": []}
    for number in range(args.http_rounds):
        progress(f"over HTTP, round {number + 1} of {args.http_rounds}")
        done = subprocess.run(command, capture_output=True, text=True)
        progress("")
        if done.returncode:
            raise SystemExit(f"h2okv bench serve failed:\n{done.stderr[-3000:]}")
        for row in json.loads(done.stdout)["rows"]:
            name = "h2o" if row["server"] == "h2okv" else row["server"]
            if row["failed"]:
                raise SystemExit(f"{name}: {row['failed']} requests failed: {row['messages']}")
            tell("over HTTP", name, row)
            samples[name].append(1 / row["new_tokens_per_second"])
    told = {
        **environment(), "threads": torch.get_num_threads(), "model": "bundled", "dtype": "fp32",
        "kv_heads": 2, "prompt": f"{low}:{high}", "budget": SHARE, "batch": many,
    }  # fmt: skip
    targets = [Target("transformers", 2.0, True), Target("sequential", 1.0, True)]
    return rows_for("serving over HTTP: s per new token", "s", samples, targets, told)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/serving.py --parts bundled --rounds 1 --clients 4 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts", default="bundled,shape,http", help="in this order; also shape-load"
    )
    parser.add_argument("--clients", nargs=2, type=int, default=[8, 32], metavar=("FEW", "MANY"))
    parser.add_argument("--new", type=int, default=128, help="median of the new tokens")
    parser.add_argument("--each", type=int, default=1, help="requests of a client, bundled model")
    parser.add_argument("--rounds", type=int, default=3, help="of the bundled model")
    parser.add_argument("--shape-rounds", type=int, default=1)
    parser.add_argument("--own-rounds", type=int, default=5, help="of the engine, of the shape")
    parser.add_argument("--http-rounds", type=int, default=1)
    parser.add_argument("--bundled-context", nargs=2, type=int, default=[1024, 1792])
    parser.add_argument("--shape-context", nargs=2, type=int, default=[2048, 4096])
    parser.add_argument("--sequential", type=int, default=4, help="requests, one after another")
    parser.add_argument("--at-once", type=int, default=4, help="a smaller batch of transformers")
    parser.add_argument("--steps", type=int, default=24, help="that are timed, of the shape")
    parser.add_argument("--check-requests", type=int, default=6)
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of transformers' steps")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Runs the parts and adds their rows to the CSV file."""
    args = parse()
    for part in args.parts.split(","):
        rows = http(args) if part == "http" else measure(part, args)
        report(args.csv, rows)


if __name__ == "__main__":
    main()
