"""Quality with the full cache: perplexity, recall by distance, attention sinks."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from training.data import Corpus, Window, held_out_windows
from training.text import HELD_OUT_BOOKS, read_held_out_book

DISTANCES = (0, 64, 128, 256, 384, 512, 768, 1024)


def stack(windows: list[Window]) -> torch.Tensor:
    """Stacks the tokens of windows of one length: int64 [B, T]."""
    return torch.from_numpy(np.stack([window.tokens for window in windows]))


@torch.inference_mode()
def loss_and_hits(
    net: LlamaForCausalLM, tokens: torch.Tensor, batch: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute, for every token after the first, its loss and whether it was the first choice.

    Args:
        net: The model.
        tokens: Windows [B, T].
        batch: Windows in one forward pass.

    Returns:
        Loss and hit, both [B, T - 1]; column i is about token i + 1.
    """
    losses, hits = [], []
    for chunk in tokens.split(batch):
        logits = net(input_ids=chunk[:, :-1], use_cache=False).logits.float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), chunk[:, 1:], reduction="none"))
        hits.append(logits.argmax(-1) == chunk[:, 1:])
    return torch.cat(losses), torch.cat(hits)


def perplexity_by_book(
    net: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    text: Path,
    windows: int,
    length: int,
) -> list[dict]:
    """Measure the held-out books.

    Args:
        net: The model.
        tokenizer: Its tokenizer.
        text: Folder of the held-out books.
        windows: Windows of each book, spread evenly over it.
        length: Tokens of a window, BOS among them.

    Returns:
        For each book and for all of them perplexity per token and bits per byte of text.
    """
    rows = []
    losses, sizes = [], []
    for name in HELD_OUT_BOOKS:
        corpus = Corpus.from_books([read_held_out_book(text, name)], tokenizer)
        tokens = stack(held_out_windows(corpus, windows, length))
        loss, _ = loss_and_hits(net, tokens)
        losses.append(loss)
        sizes.append(sum(len(tokenizer.decode(row[1:]).encode()) for row in tokens))
        rows.append(_perplexity_row(name.removesuffix(".txt"), loss, sizes[-1]))
    rows.append(_perplexity_row("all", torch.cat(losses), sum(sizes)))
    return rows


def _perplexity_row(name: str, loss: torch.Tensor, size: int) -> dict:
    return {
        "book": name,
        "tokens": loss.numel(),
        "perplexity": math.exp(loss.mean().item()),
        "bits_per_byte": loss.sum().item() / math.log(2) / size,
    }


def answer_recalled(hits: torch.Tensor, row: int, start: int, stop: int) -> bool:
    """Tell whether every token of an answer was the model's first choice."""
    return bool(hits[row, start - 1 : stop - 1].all())


def recall_by_distance(net: LlamaForCausalLM, windows: list[Window]) -> list[dict]:
    """Measure how often a fact is recalled, by the distance from its statement.

    Args:
        net: The model.
        windows: Windows with facts.

    Returns:
        One row for each range of distances and one for all, with the recall of all answers, of
        those whose property is asked of one person in the window, and of those with rivals.
    """
    _, hits = loss_and_hits(net, stack(windows))
    results = [
        (answer, answer_recalled(hits, row, answer.start, answer.stop))
        for row, window in enumerate(windows)
        for answer in window.answers
        if answer.occurrence > 0
    ]
    ranges = [(low, high) for low, high in pairwise(DISTANCES) if low < windows[0].tokens.size]
    rows = []
    for low, high in [*ranges, (ranges[0][0], ranges[-1][1])]:
        inside = [(answer, hit) for answer, hit in results if low <= answer.distance < high]
        alone = [hit for answer, hit in inside if not answer.rivals]
        rivals = [hit for answer, hit in inside if answer.rivals]
        rows.append(
            {
                "distance": f"{low}-{high - 1}",
                "answers": len(inside),
                "recall": share(alone + rivals),
                "answers_alone": len(alone),
                "recall_alone": share(alone),
                "answers_with_rivals": len(rivals),
                "recall_with_rivals": share(rivals),
            }
        )
    return rows


def share(hits: list[bool]) -> float:
    """Give the share of hits, not a number if there is nothing to count."""
    return sum(hits) / len(hits) if hits else math.nan


@torch.inference_mode()
def first_position_mass(
    net: LlamaForCausalLM, windows: list[Window], from_query: int = 128
) -> list[dict]:
    """Measure how much attention each layer gives to the first position.

    Args:
        net: The model, with attention that returns its weights ("eager").
        windows: Plain windows.
        from_query: First query that counts; the ones before have few keys to choose from.

    Returns:
        For each layer the mean over queries and heads, and the highest mean of a head.
    """
    sums: torch.Tensor | None = None
    for window in windows:
        weights = net(input_ids=stack([window]), use_cache=False, output_attentions=True).attentions
        mass = torch.stack([layer[0, :, from_query:, 0].float().mean(-1) for layer in weights])
        sums = mass if sums is None else sums + mass
    assert sums is not None
    mean = sums / len(windows)  # [layers, heads]
    return [
        {"layer": layer, "mean": heads.mean().item(), "highest_head": heads.max().item()}
        for layer, heads in enumerate(mean)
    ]
