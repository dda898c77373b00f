"""Gathers lm-eval's result files in one table: python lm_eval.py OUT/*/ > lm_eval.csv.

Every folder holds the output of one `h2okv lm-eval --output_path`; its name before the last hyphen
is what the run is called. `--markdown` prints the tables of docs/lm-eval.md instead.
"""

import csv
import json
import sys
from pathlib import Path

COLUMNS = (
    "run", "task", "shots", "documents", "metric", "value", "stderr", "policy", "heavy", "recent",
    "sink", "positions", "prefill_chunk", "protocol", "seed", "model", "weights", "dtype",
    "fewshot_seed", "lm_eval", "h2okv", "torch", "transformers", "commit",
)  # fmt: skip


def rows(folder):
    """The figures of a run's newest result file."""
    path = sorted(folder.rglob("results*.json"))[-1]
    results = json.loads(path.read_text())
    record = results["config"]["h2okv"]
    cache = record["cache"]
    for task, figures in results["results"].items():
        for metric in ("acc", "acc_norm"):
            if f"{metric},none" not in figures:
                continue
            yield {
                "run": folder.name.rsplit("-", 1)[0],
                "task": task,
                "shots": results["n-shot"][task],
                "documents": results["n-samples"][task]["effective"],
                "metric": metric,
                "value": round(figures[f"{metric},none"], 4),
                "stderr": round(figures[f"{metric}_stderr,none"], 4),
                **{name: value for name, value in cache.items() if name in COLUMNS},
                "model": record["model"],
                "weights": record["weights"][:12],
                "dtype": record["dtype"],
                "fewshot_seed": results["config"]["fewshot_seed"],
                **{name: record["versions"][name] for name in COLUMNS[19:23]},
                "commit": record["commit"],
            }


def markdown(found):
    """A table for each number of shots: tasks by runs, in percent."""
    for shots in sorted({row["shots"] for row in found}):
        chosen = [row for row in found if row["shots"] == shots]
        runs = list(dict.fromkeys(row["run"] for row in chosen))
        print(f"\n{shots} shots\n\n| task | documents | metric | {' | '.join(runs)} |")
        print("|---" * (3 + len(runs)) + "|")
        for key in dict.fromkeys((r["task"], r["documents"], r["metric"]) for r in chosen):
            values = {
                row["run"]: f"{100 * row['value']:.1f} ± {100 * row['stderr']:.1f}"
                for row in chosen
                if (row["task"], row["documents"], row["metric"]) == key
            }
            cells = [values.get(run, "") for run in runs]
            print(f"| {' | '.join(map(str, key))} | {' | '.join(cells)} |")


folders = [Path(word) for word in sys.argv[1:] if not word.startswith("--")]
order = ("full", "h2o-prompt", "h2o-paper", "recent-paper")
found = [row for folder in folders for row in rows(folder)]
found.sort(key=lambda row: (row["shots"], order.index(row["run"]), row["task"], row["metric"]))
if "--markdown" in sys.argv:
    markdown(found)
else:
    table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(found)
