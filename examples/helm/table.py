"""Prints the main figures of a HELM suite: python table.py benchmark_output/runs/SUITE."""

import json
import sys
from pathlib import Path

METRICS = ("exact_match", "quasi_exact_match", "logprob", "num_prompt_tokens")

print("| run | instances | " + " | ".join(METRICS) + " |")
print("|---" * (2 + len(METRICS)) + "|")
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if not (folder / "stats.json").is_file():
        continue
    found = {}
    for stat in json.loads((folder / "stats.json").read_text()):
        name = stat["name"]
        if name["split"] == "test" and "perturbation" not in name:
            found[name["name"]] = f"{stat.get('mean', float('nan')):.3f}"
    count = len(json.loads((folder / "scenario_state.json").read_text())["request_states"])
    label = folder.name.split("examples_helm_")[-1]
    print(f"| {label} | {count} | " + " | ".join(found.get(m, "") for m in METRICS) + " |")
