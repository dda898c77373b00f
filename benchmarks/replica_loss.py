"""`h2okv serve --ray` under load while its replicas are killed one after another.

    python benchmarks/replica_loss.py --requests 200 --kills 4

Starts two replicas of the bundled model on this machine, sends greedy requests from many clients,
every other one streamed, kills replicas (SIGKILL) repeatedly, and counts the outcomes of requests.
Every answer is compared with the one from before the first kill.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import openai
import psutil

ROWS, CLIENTS = 4, 16
PROMPT = "It was a dark and stormy night, and the"


def ask(client: openai.OpenAI, tokens: int, streams: bool) -> tuple[str, str]:
    """Send one request; return its outcome and text."""
    options = {"model": "bundled", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    text = ""
    try:
        if not streams:
            return "whole", client.completions.create(**options).choices[0].text
        for chunk in client.completions.create(**options, stream=True):
            text += chunk.choices[0].text
    except openai.APIError as error:
        code = getattr(error, "code", None) or type(error).__name__
        return f"{code} after {'some text' if text else 'nothing'}", text
    return "streamed", text


def replicas(process: subprocess.Popen) -> list[psutil.Process]:
    """Process with a copy of the model."""
    processes = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if any("ServeReplica:h2okv:model" in word for word in child.cmdline()):
                processes.append(child)
        except psutil.Error:
            continue
    return processes


def main() -> None:
    """Run it and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--kills", type=int, default=4)
    args = parser.parse_args()
    command = [
        sys.executable, "-m", "h2okv", "serve", "--ray", "--replicas", "2",
        "--max-num-seqs", str(ROWS), "--max-prompt-tokens", "256", "--port", "0", "--drain", "5",
    ]  # fmt: skip
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    outcomes: Counter[str] = Counter()
    try:
        base = server.stdout.readline().strip()
        with openai.OpenAI(base_url=base, api_key="-", max_retries=0, timeout=600) as client:
            _, expected = ask(client, args.tokens, False)
            with ThreadPoolExecutor(CLIENTS) as pool:
                futures: list[Future] = [
                    pool.submit(ask, client, args.tokens, number % 2 == 1)
                    for number in range(args.requests)
                ]
                for kill in range(args.kills):
                    share = (kill + 1) * args.requests // (args.kills + 1)
                    while sum(future.done() for future in futures) < share:
                        time.sleep(0.05)
                    running = replicas(server)
                    if len(running) == 2:
                        running[kill % 2].kill()
                        outcomes["kills"] += 1
                for future in futures:
                    outcome, text = future.result()
                    outcomes[outcome] += 1
                    outcomes["wrong text"] += not (
                        expected.startswith(text) if "after" in outcome else text == expected
                    )
            stats = client.get("/stats".replace("/", "../", 1), cast_to=dict)
    finally:
        server.terminate()
        server.wait()
    print({"requests": args.requests, **outcomes, "retried": stats["retried"]})


if __name__ == "__main__":
    main()
