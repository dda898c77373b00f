"""Scoring rules of other papers in H2O's frame, by their formulas as written.

Each rule scores the entries of a prompt in plain PyTorch, from its full attention matrix, and
replaces ``scoring="expected"`` in ``best``: 4 sinks and a recent quarter. The text after the prompt
is read on the compressed cache (``h2okv eval fidelity --protocol block``). So a rule can be
evaluated before it is implemented. Every row has the same texts and as many entries.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import quality
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from h2okv.budget import TokenBudget
from h2okv.config import CacheConfig
from h2okv.policy import BlockView, Inputs, Rule, register_policy
from h2okv_lab.evaluation.model import ModelUnderTest
from h2okv_lab.evaluation.task import Run
from h2okv_lab.evaluation.tasks.fidelity import Fidelity, Source

# Queries that see fewer keys than this give each of them too much to be compared.
FEW = 32


class Prompt:
    """One layer's prompt: its ``[H, G, T, T]`` probabilities and values, and its heavy budget."""

    def __init__(self, block: BlockView, heavy: int) -> None:
        heads = block.key.shape[1]
        self.query = block.query[0].unflatten(0, (heads, -1)).float() * block.spec.scale
        self.keys = block.key[0].float()[:, None]
        self.values = block.value[0].float()
        self.module, self.heavy = block.module, heavy
        self.norms = self.values.abs().sum(-1)

    @cached_property
    def shares(self) -> Tensor:
        logits = self.query @ self.keys.transpose(-1, -2)
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        return logits.masked_fill_(future, -torch.inf).softmax(dim=-1)

    @property
    def sums(self) -> Tensor:
        return self.shares.sum(dim=(1, 2))

    def output_norms(self) -> Tensor:
        """Mean L1 norms of the values times each query head's part of the output projection."""
        weight = self.module.o_proj.weight.float()
        heads, groups = self.query.shape[:2]
        by_head = weight.unflatten(1, (heads, groups, -1))
        mixed = torch.einsum("hnd,ohgd->hgno", self.values, by_head)
        return mixed.abs().sum(-1).mean(1)

    def largest(self) -> Tensor:
        """Return the largest probability of each key, at least the head's mean of these."""
        maxima = self.shares[:, :, FEW:].amax(dim=(1, 2))
        return torch.maximum(maxima, maxima.mean(dim=-1, keepdim=True))

    def leave_one_out(self) -> Tensor:
        """Return how far the outputs move without an entry, squared (DropKV)."""
        shares = self.shares[:, :, FEW:]
        outputs = shares @ self.values[:, None]
        odds = (shares / (1 - shares + 1e-6)).square_()
        total = odds.sum(dim=(1, 2)) * self.values.square().sum(-1)
        total -= 2 * ((odds.transpose(-1, -2) @ outputs).sum(dim=1) * self.values).sum(-1)
        lengths = outputs.square().sum(-1, keepdim=True)
        return (total + (odds * lengths).sum(dim=(1, 2))).clamp_(min=0)

    def two_scales(self) -> Tensor:
        """Half of the heavy hitters by the sum, the others by a sum that forgets."""
        length = self.shares.shape[-1]
        decayed = (0.995 ** torch.arange(length - 1, -1, -1.0))[:, None]
        recent = (self.shares * decayed).sum(dim=(1, 2))
        first = self.sums.topk(min(self.heavy // 2, length), dim=-1).indices
        return recent.scatter(-1, first, float(recent.amax()) + 1)


def pooled(scores: Tensor, kernel: int = 5) -> Tensor:
    return avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)


RULES: dict[str, Callable[[Prompt, Tensor], Tensor]] = {
    "sum": lambda prompt, _: prompt.sums,
    "sum, averaged over 5 neighbours": lambda prompt, _: pooled(prompt.sums),
    "sum x norm of W_O v": lambda prompt, _: prompt.sums * prompt.output_norms(),
    "two time scales": lambda prompt, _: prompt.two_scales(),
    "maximum, floor at its mean": lambda prompt, _: prompt.largest(),
    "maximum x norm of W_O v": lambda prompt, _: prompt.largest() * prompt.output_norms(),
    "leave-one-out error": lambda prompt, _: prompt.leave_one_out(),
    "`expected`": lambda prompt, expected: expected * prompt.norms,
    "`expected`, averaged over 5 neighbours": lambda prompt, expected: pooled(
        expected * prompt.norms
    ),
    "`expected`, norm of W_O v in place of v": lambda prompt, expected: (
        expected * prompt.output_norms()
    ),
}


def paper_rule(formula: str) -> type[Rule]:
    """Make and register the rule that scores a prompt by a formula of `RULES`."""

    class PaperRule(Rule):
        name = formula
        inputs = Inputs.QUERIES
        heavy = 0

        def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
            self.heavy = budget.heavy
            return budget

        def score_block(self, block: BlockView) -> Tensor:
            expected = block.attend_from_behind()
            if (
                block.query.shape[2] < block.key.shape[2]
            ):  # a block after the prompt decides nothing
                return expected
            return RULES[formula](Prompt(block, self.heavy), expected[0])[None]

    return register_policy(PaperRule)


def evaluate(args: argparse.Namespace, tested: ModelUnderTest) -> list[dict[str, Any]]:
    """Score the prompts by each rule in turn; return the rows of the table."""
    sources = [Source.read(path) for path in args.data]
    amounts = {"heavy": 0.75 * args.budget, "recent": 0.25 * args.budget}  # as in `best` v3
    results: dict[str, list[quality.Result]] = {}
    for rule in RULES:
        paper_rule(rule)
        config = CacheConfig(rule, **amounts, sink=4, min_tokens=0)
        task = Fidelity(
            sources=sources, texts=args.texts, raw=True, prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens, protocol="block",
        )  # fmt: skip
        name = re.sub(r"\W+", "-", rule).strip("-")
        path = args.out / f"{name}.samples.jsonl"
        (by_sample,) = quality.samples(tested, [Run(task, config)], path, rule)
        results[rule] = [by_sample[sample] for sample in task.samples]
    base = {"sum": results["sum"], "expected": results["`expected`"]}
    return [
        {"rule": rule, "samples": len(group), "budget": args.budget} | quality.measures(group, base)
        for rule, group in results.items()
    ]


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(
        __doc__, "other_rules.py out --data moby_dick.txt --texts 6 --budget 0.194 --csv rules.csv"
    )
    parser.add_argument("out", type=Path, help="folder of samples; resumes")
    parser.add_argument("--data", type=Path, action="append", required=True, help="as of fidelity")
    parser.add_argument("--texts", type=int, default=6, help="of each file")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--budget", type=float, required=True, help="of the prompt, without sinks")
    quality.run(parser, evaluate)


if __name__ == "__main__":
    main()
