"""Follow a server's bound of agreement over a run, beside the answers of all requests.

Continues passages of a book, the second half of them longer, and reads every answer again; the
sample that the bound comes from is drawn as in `h2okv serve --verify`. Appends nothing: writes one
CSV file, a row for each group of requests and line of the picture.

    python benchmarks/agreement.py --text alice.txt --output docs/results/agreement.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import h2okv

GROUP, NEW = 8, 24
SHORT, LONG = 96, 288  # tokens of a prompt
LINES = {"all": "all answers", "sample": "sampled answers", "bound": "95 % bound"}


def main() -> None:
    """Run and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cache", default="best:64,every=64")
    parser.add_argument("--verify", default="50%")
    parser.add_argument("--requests", type=int, default=160)
    options = parser.parse_args()
    sizes = [SHORT] * (options.requests // 2) + [LONG] * (options.requests // 2)
    settings = {"cache": options.cache, "verify": options.verify, "max_num_seqs": GROUP}
    with h2okv.LLM(options.model, **settings) as llm:
        tokens = llm.tokenizer(options.text.read_text("utf-8"))["input_ids"]
        prompts, start = [], 0
        for size in sizes:
            prompts.append(tokens[start : start + size])
            start += size
        rows, compared, agreed = [], 0, 0
        for at in range(0, len(prompts), GROUP):
            outputs = llm.generate(
                prompts[at : at + GROUP], max_tokens=NEW, verify=True, show_progress=False
            )
            for output in outputs:
                assert output.verified is not None
                compared += output.verified.tokens
                agreed += output.verified.agreed
            if (total := llm.agreement().total) is None:
                continue
            row = {"requests": at + GROUP, "tokens": len(prompts[at]), "answers": total.answers}
            row |= {"all": agreed / compared, "sample": total.agreement, "bound": total.bound}
            print(row, flush=True)
            rows += [row | {"line": label, "share": row[n]} for n, label in LINES.items()]
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
