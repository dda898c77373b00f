r"""kvpress's methods on the prompts of ``h2okv eval fidelity --protocol block``, at equal bytes.

kvpress 0.5.5 needs transformers below 5.3, hence a separate environment and three steps. The second
imports nothing of h2okv:

    python benchmarks/kvpress_quality.py tokens --model smollm2 --data moby_dick.txt \
        --prompt-tokens 1024 --new-tokens 96 --texts 20 --out prompts.jsonl
    kvpress-env/bin/python benchmarks/kvpress_quality.py presses prompts.jsonl --model FOLDER \
        --kept 0.2 --out rows.jsonl
    python benchmarks/kvpress_quality.py table prompts.jsonl rows.jsonl fidelity.samples.jsonl \
        --against "h2o, 20%" --csv table.csv

A prompt is read once for all presses: each compresses every layer's cache as its own hook would,
and the text after the prompt is read in one block on the compressed cache. The fraction kept is of
entries; a press stores neither scores nor positions. ``table`` compares the means with the rows of
``fidelity`` on the same prompts, with paired differences. KVzip reads the prompt twice and ranks
all layers' entries at once; it is for raw prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch

# Presses that need no training and, but for KVzip, one pass. Those after None hide entries by fake
# keys in place of freeing them: heads hold different numbers of entries, and the share is what
# attention sees.
PRESSES = (
    "ObservedAttention", "SnapKV", "TOVA", "StreamingLLM", "Knorm", "KeyDiff", "LagKV", "Cap",
    "ExpectedAttention", "Compactor", "ChunkKV SnapKV", "CriticalKV SnapKV",
    "CriticalKV ExpectedAttention", None,
    "AdaKV SnapKV", "AdaKV ExpectedAttention", "CriticalAdaKV ExpectedAttention", "KVzip",
)  # fmt: skip
REPEATING = "KVzip"  # reads the prompt a second time; one ranking over all layers and heads
EAGER = "ObservedAttention"  # looks at the attention matrix
OPTIONS: dict[str, dict[str, Any]] = {
    "StreamingLLM": {"n_sink": 4},
    # As kvpress's own evaluation sets them.
    "CriticalKV ExpectedAttention": {"use_vnorm": False},
    "CriticalAdaKV ExpectedAttention": {"use_vnorm": False},
    "AdaKV ExpectedAttention": {"epsilon": 1e-2},
}
MEASURES = ("kl", "agreement", "nll", "full_nll")


def write_tokens(args: argparse.Namespace) -> None:
    """Write the samples of ``fidelity`` as token ids, in its order."""
    from quality import under_test

    from h2okv_lab.evaluation.tasks.fidelity import Fidelity, Source

    task = Fidelity(
        sources=[Source.read(path) for path in args.data], texts=args.texts, raw=args.raw,
        prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens, protocol="block",
    )  # fmt: skip
    task.prepare(under_test(args.model), [])
    with args.out.open("w", encoding="utf-8") as file:
        for number in task.samples:
            file.write(json.dumps({"sample": number, **task._samples[number]._asdict()}) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON objects; ValueError names a line of another kind."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            reason = "is not JSON; give files that the steps before this one have written"
            raise ValueError(f"line {number} of {path} {reason}") from error
    return records


def make_press(name: str, fraction: float) -> Any:
    """Return a press by its classes' names, the inner one last."""
    import kvpress

    *outer, inner = name.split()
    options = {"compression_ratio": 1 - fraction, **OPTIONS.get(name, {})}
    press = getattr(kvpress, f"{inner}Press")(**options)
    for wrapper in reversed(outer):
        more = {"chunk_length": 20} if wrapper == "ChunkKV" else {}
        press = getattr(kvpress, f"{wrapper}Press")(press, **more)
    return press


class Compressed:
    """What a press left of a prompt: a cache, and of each layer the entries it hides."""

    def __init__(self, press: Any) -> None:
        from transformers import DynamicCache

        self.press, self.cache = press, DynamicCache()
        self.hidden: list[Any] = []

    def take(self, attention: Any, inputs: dict[str, Any], weights: Any) -> None:
        layer = inputs["past_key_values"].layers[attention.layer_idx]
        keys, values = layer.keys, layer.values
        attention.masked_key_indices = None
        if self.press is not None:
            arguments = attention, inputs["hidden_states"], keys, values, weights, inputs
            keys, values = self.press.compress(*arguments)
        self.hidden.append(attention.masked_key_indices)
        attention.masked_key_indices = None
        self.cache.update(keys.clone(), values.clone(), attention.layer_idx)

    def share(self, prompt: int) -> float:
        """Entries that attention sees, of those of the prompt."""
        seen = 0
        for layer, hidden in zip(self.cache.layers, self.hidden, strict=True):
            seen += math.prod(layer.keys.shape[:3]) - (0 if hidden is None else len(hidden[0]))
        heads = self.cache.layers[0].keys.shape[1]
        return seen / (prompt * heads * len(self.cache.layers))


@torch.no_grad()
def read_prompt(model: Any, prompt: list[int], compressed: list[Compressed]) -> None:
    """Read a prompt once; each of ``compressed`` compresses every layer."""
    from transformers import DynamicCache

    def look(attention: Any, _: Any, inputs: dict[str, Any], output: Any) -> None:
        for x in compressed:
            x.take(attention, inputs, output[1])

    with ExitStack() as hooks:
        for x in compressed:
            if x.press is not None:
                x.press.post_init_from_model(model)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            layer.self_attn.masked_key_indices = None
            handle = layer.self_attn.register_forward_hook(look, with_kwargs=True)
            hooks.callback(handle.remove)
        model.model(input_ids=torch.tensor([prompt]), past_key_values=DynamicCache())


@torch.no_grad()
def repeat_prompt(model: Any, prompt: list[int], by_fraction: dict[float, Compressed]) -> None:
    """Let KVzip (arXiv 2505.23416) rank a raw prompt's cache once while the model repeats it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    fractions = sorted(by_fraction)
    press = make_press(REPEATING, fractions[0])
    # What the press's own context manager sets, but that no part of a raw prompt is a template's.
    press.prefix_length, suffix = 0, "\n"
    if tokenizer.chat_template is not None:
        message = {"role": "user", "content": "#context#"}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        suffix = text.rpartition("#context#")[2]
    press._suffix_ids = tokenizer.encode(suffix, return_tensors="pt", add_special_tokens=False)
    press._context_ids = torch.tensor([prompt])
    press._cache = by_fraction[fractions[0]].cache
    press._perform_kvzip_compression(model, tokenizer)
    for fraction in fractions:
        press.compression_ratio = 1 - fraction
        press.compress_post(model)
        hidden = [layer.self_attn.masked_key_indices for layer in model.model.layers]
        by_fraction[fraction].hidden = hidden
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None


@torch.no_grad()
def log_probs(model: Any, compressed: Compressed, prompt: int, block: list[int]) -> torch.Tensor:
    """Return log-probabilities after each token of a block, fp32 ``[N, V]``."""
    for layer, hidden in zip(model.model.layers, compressed.hidden, strict=True):
        layer.self_attn.masked_key_indices = hidden
    positions = torch.arange(prompt, prompt + len(block)).unsqueeze(0)
    logits = model(
        torch.tensor([block]), past_key_values=compressed.cache, position_ids=positions
    ).logits
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return logits[0].float().log_softmax(-1)


def compare(full: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Means of `MEASURES` over the tokens, as ``fidelity`` has them."""
    kl = (full.exp() * (full - log_probs)).sum(-1).mean()
    agreement = (full.argmax(-1) == log_probs.argmax(-1)).float().mean()
    losses = [-x.gather(1, targets.unsqueeze(1)).mean() for x in (log_probs, full)]
    return [float(value) for value in (kl, agreement, *losses)]


def prepare(name: str, fraction: float) -> Compressed:
    """Return an empty cache for a press; KVzip's is full until the prompt is repeated."""
    return Compressed(None if name == REPEATING else make_press(name, fraction))


def run_presses(args: argparse.Namespace) -> None:
    """Add the missing rows of prompts and presses."""
    samples = read_lines(args.prompts)  # mistakes show before models load
    import kvpress  # noqa: F401  patches attention to respect hidden entries
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    names = args.presses or [name for name in PRESSES if name]
    models = {
        eager: AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype), attn_implementation=kind
        ).eval()
        for eager, kind in ((False, "sdpa"), (True, "eager"))
        if any((EAGER in name) == eager for name in names)
    }
    done = set()
    if args.out.exists():
        done = {(row["sample"], row["press"]) for row in read_lines(args.out)}
    # A press's label names its fraction where there are several.
    labels = {
        name if len(args.kept) == 1 else f"{name}, {fraction:.0%}": (name, fraction)
        for name, fraction in product(names, args.kept)
    }
    with args.out.open("a", encoding="utf-8") as file:
        for sample in tqdm(samples):
            missing = [label for label in labels if (sample["sample"], label) not in done]
            prompt, following = sample["prompt"], sample["following"]
            targets = torch.tensor(following[1:])[-sample["compared"] :]
            full, lines = None, ""
            for eager, model in models.items():
                group = [label for label in missing if (EAGER in label) == eager]
                if not group:
                    continue
                presses = {label: prepare(*labels[label]) for label in group}
                full_cache = Compressed(None)
                read_prompt(model, prompt, [full_cache, *presses.values()])
                repeated = {
                    labels[label][1]: compressed
                    for label, compressed in presses.items()
                    if labels[label][0] == REPEATING
                }
                if repeated:
                    repeat_prompt(model, prompt, repeated)
                outputs = log_probs(model, full_cache, len(prompt), following[:-1])
                full = outputs[-sample["compared"] :] if full is None else full
                for label, compressed in presses.items():
                    share = compressed.share(len(prompt))
                    outputs = log_probs(model, compressed, len(prompt), following[:-1])
                    values = compare(full, outputs[-sample["compared"] :], targets)
                    row = {"sample": sample["sample"], "press": label, "kept": share}
                    row |= zip(MEASURES, values, strict=True)
                    lines += json.dumps(row) + "\n"
            file.write(lines)  # of a prompt all or none
            file.flush()


def read_fidelity(path: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Return the rows of ``fidelity``'s sample file, by cache and sample."""
    results: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for record in read_lines(path):
        if "result" in record:
            name = record["run"].removeprefix("fidelity: ")
            results[name][record["sample"]] = record["result"]
    return results


def budget(cache: str) -> str:
    """Return the budget in a cache's name, or nothing."""
    match = re.search(r"[\d.]+%", cache)
    return match[0] if match else ""


def make_table(args: argparse.Namespace) -> None:
    """Means over prompts, with intervals, and differences to one cache on the same ones."""
    from quality import bytes_fraction, measures

    from h2okv_lab.tables import markdown_table, write_csv

    sources = {}
    for sample in read_lines(args.prompts):
        sources[sample["sample"]] = sample["source"]
    results: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for row in read_lines(args.rows):
        results[f"kvpress, {row['press']}"][row["sample"]] = row
    for path in args.fidelity:
        results |= read_fidelity(path)
    if unknown := set(args.against) - results.keys():
        raise ValueError(f"--against {min(unknown)!r} is unknown; there are {'; '.join(results)}")
    rows = []
    for against, (cache, by_sample) in product(args.against, results.items()):
        # Of several, each is compared with the caches of its own budget.
        if len(args.against) > 1 and budget(cache) != budget(against):
            continue
        base = results[against]
        shared = sorted(by_sample.keys() & base.keys() & sources.keys())
        mine, base_results = ([by[n] for n in shared] for by in (by_sample, base))
        row: dict[str, Any] = {"cache": cache, "prompts": len(shared)}
        fractions = [result["kept"] for result in mine if "kept" in result]
        row["kept"] = sum(fractions) / len(fractions) if fractions else None
        in_bytes = all("bytes" in result for result in mine)
        row["bytes_fraction"] = bytes_fraction(mine) if in_bytes else row["kept"]
        row |= measures(mine, {"against": base_results}, "kl_")
        for source in dict.fromkeys(sources[n] for n in shared):
            of_source = [by_sample[n]["kl"] for n in shared if sources[n] == source]
            row[f"kl {source}"] = sum(of_source) / len(of_source)
        rows.append(row)
    rows.sort(key=lambda row: float(row["kl"]))
    if args.csv:
        write_csv(args.csv, rows, list(rows[0]))

    def cell(row: dict[str, Any], name: str, form: str = ".3f") -> str:
        mean, *ends = (float(row[name + end] or "nan") for end in ("", "_low", "_high"))
        interval = " to ".join(f"{end:{form}}" for end in ends)
        return f"{mean:{form}}" + ("" if math.isnan(ends[0]) else f" ({interval})")

    lines = [
        [
            row["cache"], row["prompts"], cell(row, "kl"), cell(row, "kl_against", "+.3f"),
            f"{float(row['agreement']):.3f}", f"{math.exp(float(row['log_loss'])):.3f}",
        ]
        for row in rows
    ]  # fmt: skip
    less = f"less {' or '.join(args.against)}'s"
    header = ["cache", "prompts", "KL to the full cache", less, "agreement"]
    print(markdown_table([*header, "perplexity ratio"], lines))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(required=True)
    tokens = steps.add_parser("tokens", help="write the prompts, in h2okv's environment")
    tokens.add_argument("--model", default="smollm2")
    tokens.add_argument("--data", type=Path, action="append", required=True)
    tokens.add_argument("--prompt-tokens", type=int, default=1024)
    tokens.add_argument("--new-tokens", type=int, default=96)
    tokens.add_argument("--texts", type=int, help="of each file")
    tokens.add_argument("--raw", action="store_true", help="prompts without a chat template")
    tokens.add_argument("--out", type=Path, required=True)
    tokens.set_defaults(run=write_tokens)
    presses = steps.add_parser("presses", help="run kvpress on them, in its environment")
    presses.add_argument("prompts", type=Path)
    presses.add_argument("--model", required=True, help="a folder")
    presses.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    presses.add_argument(
        "--kept", type=float, nargs="+", default=[0.2], help="shares of a prompt's entries"
    )
    presses.add_argument("--presses", nargs="+", choices=[name for name in PRESSES if name])
    presses.add_argument("--out", type=Path, required=True, help="rows; resumes")
    presses.set_defaults(run=run_presses)
    table = steps.add_parser("table", help="set both side by side, in h2okv's environment")
    table.add_argument("prompts", type=Path)
    table.add_argument("rows", type=Path)
    table.add_argument("fidelity", type=Path, nargs="+", help="NAME.samples.jsonl of `fidelity`")
    table.add_argument(
        "--against", required=True, nargs="+",
        help="the cache that others are compared with; several: each with those of its budget",
    )  # fmt: skip
    table.add_argument("--csv", type=Path)
    table.set_defaults(run=make_table)
    args = parser.parse_args()
    try:
        args.run(args)
    except (OSError, ValueError, ImportError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
