"""An agent's conversation that grows turn by turn, sent whole to servers with prefix caches.

Each turn adds a tool's result to the messages, the source of one of this package's files, and asks
for a sentence about it. A row has the turn's prompt, the tokens that the server's prefix cache had
read, the time to the first token (of the wall clock, and of the server's processors, which other
load on the machine moves less), and the server's resident memory after the answer. Servers run one
after another, each in a process of its own with one thread. A server that has all its rows is left
out, so that an interrupted run goes on with the same command. llama.cpp is the package xllamacpp.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
from record import RESULTS, environment, progress
from serve_soak import free_port

import h2okv
from h2okv_lab.tables import COLOURS, MARKERS, CsvFile, new_figure, read_csv, save_figure, write_csv

CSV = RESULTS / "agent_loop.csv"
FIELDS = (
    "date", "commit", "machine", "model", "server", "settings", "turn", "prompt_tokens",
    "cached_tokens", "first_token_s", "first_token_cpu_s", "rss_mib", "load",
)  # fmt: skip
SERVERS = ("h2okv", "h2okv, no states", "llama.cpp")
ANSWER = 24  # tokens
OTHER_TOKENS = 100  # of a turn: what its messages have besides the tool's result
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name, description in (
        ("read_file", "Return the text of a file"),
        ("list_folder", "List the files of a folder"),
    )
]
SYSTEM = (
    "You review a repository. Tools give you its files. After each file say in one plain sentence"
    " what it does; call no tool unless the user asks for a file."
)


def turn_messages(turn: int, characters: int) -> list[dict[str, Any]]:
    """Return the messages that a turn adds: a request, the call, and the file that it gives."""
    files = sorted(Path(h2okv.__file__).parent.rglob("*.py"), key=lambda path: path.stat().st_size)
    text = "\n".join(path.read_text(encoding="utf-8") for path in files[-40:])
    text = text[(turn - 1) * characters : turn * characters]
    path = f"src/module_{turn}.py"
    function = {"name": "read_file", "arguments": f'{{"path": "{path}"}}'}
    call = {"id": f"call_{turn}", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"What does {path} do?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": text},
    ]


def command(server: str, port: int, args: argparse.Namespace) -> list[str]:
    """Return the command that starts a server."""
    if server == "llama.cpp":
        return [sys.executable, __file__, "--child", str(port), "--model", args.model,
                "--context", str(args.context)]  # fmt: skip
    size = "0" if server == "h2okv, no states" else args.prefix_cache
    return [
        sys.executable, "-m", "h2okv", "serve", "--model", args.model, "--port", str(port),
        "--dtype", args.dtype, "--budget", str(args.budget), "--max-num-seqs", "1",
        "--max-prompt-tokens", str(args.context), "--prefix-cache", size, "--timeout", "7200",
        *(() if args.memory == "none" else ("--memory", args.memory)),
    ]  # fmt: skip


def settings(server: str, args: argparse.Namespace) -> str:
    """Return what a row says of a server's cache and weights."""
    if server == "llama.cpp":
        return f"weights as in the file; full cache of {args.context} tokens in 16 bits"
    limits = f"prefix cache {args.prefix_cache}"
    if args.memory != "none":
        limits += f", memory {args.memory}"
    return f"{args.dtype}; {args.budget} entries; {limits}"


def serve_llama_cpp(port: int, args: argparse.Namespace) -> None:
    """Run llama.cpp's server, with its prefix cache, until it is killed."""
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path, params.port = args.model, port
    params.n_parallel, params.n_ctx = 1, args.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_prompt, params.use_jinja, params.warmup = True, True, False
    params.verbosity = -1
    server = Server(params)
    while server:
        time.sleep(3600)


@contextmanager
def running(server: str, args: argparse.Namespace) -> Iterator[tuple[openai.OpenAI, Any]]:
    """Start a server; give a client and its process once it answers."""
    port = free_port()
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read if the server ends early)
    child = subprocess.Popen(
        command(server, port, args), env=environ, stdout=subprocess.DEVNULL,
        stderr=None if args.verbose else errors,
    )  # fmt: skip
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=7200, max_retries=0
    )
    try:
        while True:
            if child.poll() is not None:
                errors.seek(0)
                *_, reason = ["see above", *errors.read().splitlines()]
                raise ValueError(f"{server} does not start: {reason}")
            try:
                client.models.list()
                break
            except openai.APIError:
                time.sleep(0.5)
        yield client, psutil.Process(child.pid)
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()


def ask(client: openai.OpenAI, process: Any, messages: list[Any]) -> tuple[str, dict[str, Any]]:
    """Send a conversation; return the answer and what was measured."""

    def processor_seconds() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    start, used = time.perf_counter(), processor_seconds()
    measured: dict[str, Any] = {}
    text = ""
    stream: Any = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=messages, tools=TOOLS, temperature=0,
        max_tokens=ANSWER, stream=True, stream_options={"include_usage": True},
    )  # type: ignore[call-overload]  # fmt: skip
    for chunk in stream:
        delta = chunk.choices[0].delta if chunk.choices else None
        if delta is not None and (delta.content or delta.tool_calls):
            measured.setdefault("first_token_s", time.perf_counter() - start)
            measured.setdefault("first_token_cpu_s", processor_seconds() - used)
            text += delta.content or ""
        if chunk.usage is not None:
            measured["prompt_tokens"] = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            timings = (chunk.model_extra or {}).get("timings") or {}
            cached = timings.get("cache_n", details and details.cached_tokens)
            measured["cached_tokens"] = cached or 0
    measured["rss_mib"] = process.memory_info().rss / 2**20
    return text, measured


def measure(server: str, args: argparse.Namespace, csv: CsvFile) -> None:
    """Let a conversation grow; append a row for each turn."""
    described = environment()
    row = {name: described[name] for name in ("date", "commit", "machine")}
    row |= {"model": Path(args.model).name, "server": server, "settings": settings(server, args)}
    tokens = args.tokens // args.turns - OTHER_TOKENS
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    with running(server, args) as (client, process):
        ask(client, process, [{"role": "user", "content": "Hello"}])
        for turn in range(1, args.turns + 1):
            messages += turn_messages(turn, round(args.characters * tokens))
            progress(f"{server}: turn {turn} of {args.turns}")
            text, measured = ask(client, process, messages)
            messages.append({"role": "assistant", "content": text or "..."})
            csv.append(row | measured | {"turn": turn, "load": os.getloadavg()[0]})
            progress("")
            print(f"{server}, turn {turn}: {measured}", flush=True)


def finished(path: Path, args: argparse.Namespace) -> set[str]:
    """Return the servers with all rows of this run's settings; drop the rows of a cut-off run."""
    if not path.exists():
        return set()
    rows, done = read_csv(path), set()
    for server in SERVERS:
        of_server = [
            row for row in rows
            if (row["server"], row["model"], row["settings"])
            == (server, Path(args.model).name, settings(server, args))
        ]  # fmt: skip
        if len(of_server) >= args.turns:
            done.add(server)
        else:
            rows = [row for row in rows if row not in of_server]
    write_csv(path, rows, FIELDS)
    return done


def plot(path: Path, csv: Path) -> None:
    """Draw time to first token, and memory beyond the first turn's, by turn."""
    rows = read_csv(csv)
    figure = new_figure(9, 3.6)
    panels = {
        "first_token_cpu_s": "processor time to first token, s",
        "rss_mib": "resident memory above the first turn's, MiB",
    }
    for axes, (field, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        runs = dict.fromkeys((row["server"], row["settings"]) for row in rows)
        for number, run in enumerate(runs):
            points = [
                (int(row["turn"]), float(row[field]))
                for row in rows
                if (row["server"], row["settings"]) == run
            ]
            label = f"h2okv, {run[1].split(', ')[-1]}" if "memory" in run[1] else run[0]
            first = points[0][1] if field == "rss_mib" else 0.0
            style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 4}
            turns, values = zip(*points, strict=True)
            axes.plot(turns, [value - first for value in values], label=label, **style)
        axes.set(xlabel="turn", ylabel=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    save_figure(figure, path)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled", help="a GGUF file, for llama.cpp too")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=["h2okv", "llama.cpp"])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16000, help="of the last turn, about")
    parser.add_argument("--characters", type=float, default=3.6, help="of a token of source code")
    parser.add_argument("--context", type=int, default=20000)
    parser.add_argument("--budget", type=int, default=1024, help="entries of h2okv")
    parser.add_argument("--dtype", default="bfloat16", help="of h2okv")
    parser.add_argument("--prefix-cache", default="64MiB", help="of h2okv")
    parser.add_argument("--memory", default="3GiB", help="limit of h2okv's process, or none")
    parser.add_argument("--csv", type=Path, default=CSV, help="file to add rows to")
    parser.add_argument("--plot", type=Path, help="draw the CSV, measure nothing")
    parser.add_argument("--verbose", action="store_true", help="show what servers write")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    args = parse()
    if args.child is not None:
        serve_llama_cpp(args.child, args)
    elif args.plot:
        plot(args.plot, args.csv)
    else:
        done = finished(args.csv, args)
        csv = CsvFile(args.csv, FIELDS)
        for server in args.servers:
            if server not in done:
                try:
                    measure(server, args, csv)
                except ValueError as error:
                    print(f"agent_loop.py: error: {error}", file=sys.stderr)
                    sys.exit(2)


if __name__ == "__main__":
    main()
