"""Resident memory of a server over a quarter of an hour.

`h2okv serve` on the bundled model in a separate process, under a mixed load: prompts of all lengths
up to the window, streamed and not, sampled and greedy, several outputs, budgets by request; some
clients disconnect early, some requests are invalid, and some greedy prompts are repeated, whose
texts must stay the same. Its resident memory is read every five seconds, after a minute to warm up;
the median of the last third may be at most 3 % above that of the first. In the end every row must
be free.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from record import Target, environment, progress, report, rows_for

RESULTS = Path(__file__).parent / "results"
WARMUP = 60.0
EVERY = 5.0
LIMIT = 1.03
PAGE = 4096


class Clients:
    """Concurrent clients until a deadline, each with its own random generator."""

    def __init__(self, url: str, until: float) -> None:
        self.url = url
        self.until = until
        self.outcomes: Counter[str] = Counter()
        self.texts: dict[str, str] = {}

    async def run(self, number: int, session: aiohttp.ClientSession) -> None:
        """Run one client: request after request."""
        draw = random.Random(number)
        while time.monotonic() < self.until:
            kind = draw.choices(("plain", "stream", "leaves", "wrong", "again"), (4, 4, 2, 1, 2))[0]
            self.outcomes[f"{kind}: {await getattr(self, f'_{kind}')(draw, session)}"] += 1

    def _request(self, draw: random.Random, **other: Any) -> dict[str, Any]:
        prompt = [draw.randrange(5, 4000) for _ in range(int(1600 ** draw.random()) + 1)]
        body: dict[str, Any] = {
            "model": "bundled", "prompt": prompt, "max_tokens": draw.randint(1, 120),
            "temperature": draw.choice((0, 0.8)), "n": draw.choice((1, 1, 1, 2)),
            "seed": draw.randrange(1000), "ignore_eos": True,
        }  # fmt: skip
        if draw.random() < 0.2:
            body["h2o"] = {"heavy": draw.randint(1, 40), "recent": draw.randint(1, 40)}
        return {**body, **other}

    async def _plain(self, draw: random.Random, session: aiohttp.ClientSession) -> str:
        async with session.post(self.url, json=self._request(draw)) as reply:
            await reply.json()
            return str(reply.status)

    async def _stream(self, draw: random.Random, session: aiohttp.ClientSession) -> str:
        async with session.post(self.url, json=self._request(draw, stream=True)) as reply:
            last = b""
            async for line in reply.content:
                last = line.strip() or last
            return "done" if last == b"data: [DONE]" else f"{reply.status} {last[:60]!r}"

    async def _leaves(self, draw: random.Random, session: aiohttp.ClientSession) -> str:
        body = self._request(draw, stream=True, max_tokens=200)
        async with session.post(self.url, json=body) as reply:
            for _ in range(draw.randint(0, 20)):
                await reply.content.readline()
            reply.close()
        return "left"

    async def _wrong(self, draw: random.Random, session: aiohttp.ClientSession) -> str:
        body = draw.choice(
            (b"{", b"\xff\xfe", b'{"model": "bundled", "prompt": "a", "nonsense": 1}')
        )
        headers = {"Content-Type": "application/json"}
        async with session.post(self.url, data=body, headers=headers) as reply:
            await reply.read()
            return str(reply.status)

    async def _again(self, draw: random.Random, session: aiohttp.ClientSession) -> str:
        number = draw.randrange(5)
        body = self._request(
            random.Random(1000 + number), temperature=0, n=1, max_tokens=30, stream=False
        )
        async with session.post(self.url, json=body) as reply:
            text = (await reply.json())["choices"][0]["text"]
        return "the same" if self.texts.setdefault(str(number), text) == text else "ANOTHER TEXT"


async def soak(args: argparse.Namespace, process: subprocess.Popen[bytes], url: str) -> Clients:
    """Run clients and read the server's memory; write one line for every reading."""
    begun = time.monotonic()
    clients = Clients(f"{url}/v1/completions", begun + args.minutes * 60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        tasks = [asyncio.create_task(clients.run(n, session)) for n in range(args.clients)]
        with args.series.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(["seconds", "resident_bytes", "running", "finished", "new_tokens"])
            while not all(task.done() for task in tasks):
                await asyncio.sleep(EVERY)
                async with session.get(f"{url}/stats") as reply:
                    stats = await reply.json()
                pages = Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1]
                seconds = time.monotonic() - begun
                row = [stats[name] for name in ("running", "finished", "new_tokens")]
                lines.writerow([f"{seconds:.1f}", int(pages) * PAGE, *row])
                file.flush()
                progress(
                    f"{seconds / 60:.1f} of {args.minutes:g} minutes, {stats['finished']} requests,"
                    f" {int(pages) * PAGE / 2**20:.1f} MiB"
                )
        await asyncio.gather(*tasks)
        await asyncio.sleep(1)
        async with session.get(f"{url}/stats") as reply:
            stats = await reply.json()
        progress("")
        print(stats)
        if stats["running"] or stats["waiting"]:
            raise SystemExit("rows are still in use though every client is gone")
    return clients


def free_port() -> int:
    """Return a port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def answers(url: str) -> None:
    """Wait until the server answers."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)


def main() -> None:
    """Run the soak and add its row to the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--csv", type=Path, default=RESULTS / "serving.csv")
    parser.add_argument("--series", type=Path, default=RESULTS / "serve_soak.csv")
    args = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "h2okv",
            "serve",
            "--port",
            str(port),
            "--max-num-seqs",
            str(args.rows),
        ]
    )
    try:
        asyncio.run(asyncio.wait_for(answers(url), 120))
        clients = asyncio.run(soak(args, process, url))
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    for outcome, count in sorted(clients.outcomes.items()):
        print(f"{outcome}: {count}")
    print(f"exit code after SIGTERM: {code}")
    with args.series.open(encoding="utf-8") as file:
        read = [(float(r["seconds"]), int(r["resident_bytes"])) for r in csv.DictReader(file)]
    warm = [size for seconds, size in read if seconds > min(WARMUP, args.minutes * 20)]
    third = len(warm) // 3
    sizes = {"last third": [s / 2**20 for s in warm[-third:]], "first third": [
        s / 2**20 for s in warm[:third]]}  # fmt: skip
    print(f"{statistics.median(sizes['first third']):.1f} MiB, then"
          f" {statistics.median(sizes['last third']):.1f} MiB")  # fmt: skip
    setting = {**environment(), "threads": "", "model": "bundled", "dtype": "fp32", "kv_heads": 2,
            "batch": args.clients, "prompt": "1 to 1,600", "budget": 0.2}  # fmt: skip
    samples = {"h2o": sizes["last third"], "the first third": sizes["first third"]}
    rows = rows_for(
        f"serving: resident memory over {args.minutes:g} minutes", "MiB", samples,
        [Target("the first third", LIMIT)], setting,
    )  # fmt: skip
    report(args.csv, rows)


if __name__ == "__main__":
    main()
