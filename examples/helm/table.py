"""Prints a HELM suite's accuracy, and which completions a cache changed: python table.py SUITE."""

import json
import sys
from pathlib import Path

FULL = "h2okv_full"

print("| scenario | cache | requests | exact match | completions as with the full cache |")
print("|---|---|---|---|---|")
full = {}
runs = [folder for folder in Path(sys.argv[1]).iterdir() if (folder / "stats.json").is_file()]
# The full cache first: the others are compared with it.
for folder in sorted(runs, key=lambda run: (run.name.split("model=")[0], FULL not in run.name)):
    scenario, model = folder.name.split("model=")
    [match] = [
        stat["mean"]
        for stat in json.loads((folder / "stats.json").read_text())
        if stat["name"]["name"] == "exact_match"
        and stat["name"]["split"] == "test"
        and "perturbation" not in stat["name"]
    ]
    states = json.loads((folder / "scenario_state.json").read_text())["request_states"]
    completions = [state["result"]["completions"][0] for state in states]
    answers = [(text["text"], round(text["logprob"], 2)) for text in completions]
    expected = full.setdefault(scenario, answers)
    same = sum(answer == other for answer, other in zip(answers, expected, strict=True))
    method = "" if "method=" not in scenario else ", " + scenario.split("method=")[1].rstrip(":,")
    name = scenario.replace(",", ":").split(":")[0] + method
    cache = model.removeprefix("h2okv_")
    print(f"| {name} | {cache} | {len(states)} | {match:.3f} | {same} of {len(states)} |")
