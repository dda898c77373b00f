"""Checks of prompts, pins, blocks and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from h2okv.cache.argument import CACHE
from h2okv.cache.base_layer import BaseLayer
from h2okv.cache.rope import ranks_of
from h2okv.ops.choice import protected_entries
from h2okv.policy import Inputs


def check_ids(input_ids: Any) -> None:
    """Refuse what is no tensor of tokens ``[batch, tokens]``."""
    is_tensor = isinstance(input_ids, Tensor)
    if is_tensor and input_ids.dim() == 2 and not input_ids.is_floating_point():
        return
    got = f"{input_ids.dtype} {[*input_ids.shape]}" if is_tensor else type(input_ids).__name__
    raise ValueError(
        f"input_ids must be an int tensor [batch, tokens], got {got}; give for example"
        " tokenizer(text, return_tensors='pt').input_ids."
    )


def check_prompt(layer: BaseLayer, lengths: Sequence[int], block: int) -> None:
    """Refuse a first block that cannot be read, given the real tokens of each prompt."""
    if 0 in lengths:
        raise ValueError(
            f"sequence {lengths.index(0)} of the batch is all padding; give every sequence a "
            "token, or leave it out."
        )
    if layer.rule.inputs is Inputs.WINDOW and (layer.prompt.expected_length or block) > block:
        raise ValueError(
            f"policy={layer.rule.name!r} decides once, by the end of the whole prompt, and got "
            f"{block} of its {layer.prompt.expected_length} tokens; read it in one forward."
        )
    check_pins(layer, lengths)


def parse_pins(spans: Iterable[Sequence[int]], name: str = "pin") -> tuple[tuple[int, int], ...]:
    """Spans of tokens in their order, without those that are empty."""
    pins = []
    if isinstance(spans, str) or not isinstance(spans, Iterable):
        raise ValueError(f"{name}s must be a list of (start, stop), got {spans!r}; give [(0, 4)].")
    for span in spans:
        ends = tuple(span) if isinstance(span, Sequence) else ()
        numbers = [end for end in ends if isinstance(end, int) and not isinstance(end, bool)]
        if len(ends) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
            shown = ends or span
            raise ValueError(
                f"{name} {shown!r} must be (start, stop) of tokens with 0 <= start <= stop,"
                " as in [(0, 4)]."
            )
        pins += [(ends[0], ends[1])] if ends[0] < ends[1] else []
    pins.sort()
    for before, after in pairwise(pins):
        if after[0] < before[1]:
            raise ValueError(f"{name}s {before} and {after} overlap; give spans that do not.")
    return tuple(pins)


def check_forget(layer: BaseLayer, spans: Sequence[tuple[int, int]]) -> None:
    """Refuse spans that a layer cannot forget."""
    problem = ""
    if layer.position_rule.rolls:
        problem = "positions='rolling' places entries by their number; give positions='original'"
    elif layer.log is not None:
        problem = "drafts are recorded; call end_past_recording() first"
    elif not layer.holds_entries:
        problem = "the cache is empty; run the model with it first"
    elif spans:
        seen, sink = min(layer.state.lengths()), max(b.sink for b in layer.state.budgets)
        if spans[-1][1] > seen:
            problem = f"span {spans[-1]} ends after the {seen} tokens seen; shorten it"
        elif spans[0][0] < sink:
            problem = (
                f"span {spans[0]} begins in the sink, the first {sink} tokens, which stay; begin"
                f" at {sink} or later"
            )
    if problem:
        raise ValueError(f"H2OCache.forget: {problem}.")


def check_pins(layer: BaseLayer, lengths: Sequence[int]) -> None:
    """Refuse pins outside the prompts, or more of them than the heavy part."""
    if not layer.prompt.pins or not layer.rule.evicts:
        return
    for length in lengths:
        budget = layer.rule.allocate_budget(layer.budget.resolve(length))
        count = sum(stop - max(start, min(stop, budget.sink)) for start, stop in layer.prompt.pins)
        if layer.rule.grows and layer.position_rule.chunk is not None:
            problem = (
                "pins have no room where a prompt is cut before of=seen (grows=True) has counted"
                " them; give every=prompt+32, or leave one of them out."
            )
        elif (last := layer.prompt.pins[-1])[1] > length:
            problem = f"pin {last} ends after the prompt of {length} tokens; shorten it."
        elif count > budget.heavy:
            by_head = layer.head_budgets is not None
            problem = (
                f"{count} tokens are pinned and policy={layer.rule.name!r} keeps {budget.heavy}"
                f" heavy ones of this prompt{' in a head' * by_head}, pinned ones among them; raise"
                f" heavy, or pin less{', or give all heads as many, layers=even' * by_head}."
            )
        else:
            continue
        raise ValueError(f"H2OCache: {problem}")


def check_follows(
    layer: BaseLayer, position_ids: Tensor | None, real: Tensor | None, length: int
) -> None:
    """Refuse a block that does not start where the last one ended.

    ``generate(use_cache=False)`` reads the whole text again at every step, which would count
    every token again. Reads the device; of steps, which must not wait for it, only a CPU's are
    checked, and only behind padding.
    """
    if position_ids is None or position_ids.dim() != 2 or not layer.is_initialized:
        return
    state, has_budgets = layer.state, layer.holds_budgets
    is_cpu = state.positions.is_cpu
    if (not layer.begins_forward and not is_cpu) or layer.forward.sums is not None:
        return
    if length == 1 and has_budgets and (layer.counts_padding is None or not is_cpu):
        return
    position_ids = position_ids.to(layer.device)
    if has_budgets:
        last, before = position_ids.amax(dim=1), state.num_real_tokens
        new = torch.full_like(before, length) if real is None else real.sum(dim=1)
        # Positions count the real tokens (generate) or all of them (a bare forward).
        by_text = (last == before + new - 1) | (new == 0)
        by_columns = (last == layer.cumulative_length + length - 1) | (new == 0)
        follows = by_text | by_columns
        if not bool(follows.all()):
            row = int((~follows).nonzero()[0])
            seen, count, end = (int(n[row]) for n in (before, new, last.expand_as(new)))
            problem = f"that end at position {end}, which does not go on from there"
            if end == count - 1:
                problem = "whose positions begin at 0, which does not go on from there"
            raise ValueError(
                f"H2OCache has seen {seen} tokens of sequence {row} and got {count} more {problem};"
                f" {going_on(seen, count, end == count - 1)}."
            )
        goes_on = by_columns if layer.counts_padding else by_text
        if layer.counts_padding is not None and not bool(goes_on.all()):
            row = int((~goes_on).nonzero()[0])
            padding = int(layer.cumulative_length - before[row])
            habit = "did and now do not" if layer.counts_padding else "did not and now do"
            raise ValueError(
                f"position_ids: those of sequence {row} so far {habit} count its {padding} tokens "
                f"of padding, so that a gap would follow; {_REMEDY}."
            )
    if real is not None and layer.begins_forward and layer.counts_padding is None:
        layer.counts_padding = _counts_padding(layer, position_ids, real)


def going_on(seen: int, count: int, is_from_start: bool) -> str:
    """Return the remedy for a block that does not continue the tokens seen."""
    if is_from_start and count == seen + 1:
        return "leave out use_cache=False, which reads the whole text again at every step"
    remedy = f"for a further turn call generate(**cache.next_turn(input_ids), {CACHE}=cache), for"
    remedy += " another text cache.reset() first"
    if is_from_start:
        remedy += f"; a model that counts from 0 needs position_ids {seen} to {seen + count - 1}"
    return remedy


_REMEDY = (
    "give attention_mask [batch, tokens seen + new tokens] with 0 for all padding, as"
    " cache.next_turn(input_ids) does, and position_ids that go on from those before"
)


def _counts_padding(layer: BaseLayer, position_ids: Tensor, real: Tensor) -> bool | None:
    """Tell whether the model's positions count padding before real tokens; ``None``: unknown."""
    column, is_there = real.to(torch.uint8).argmax(dim=1), real.any(dim=1)
    first = position_ids.expand(len(real), -1).gather(1, column.unsqueeze(1)).squeeze(1)
    by_text, by_columns = layer.state.num_real_tokens, layer.cumulative_length + column
    differs = is_there & (by_text != by_columns)
    for counts, expected in ((False, by_text), (True, by_columns)):
        if bool(differs.any()) and bool(((first == expected) | ~differs).all()):
            return counts
    return None


def check_mask(layer: BaseLayer, attention_mask: Tensor) -> None:
    """Refuse a mask ``[B, tokens seen + T]`` that marks padding seen as text, or the reverse."""
    seen, before = int(layer.get_seq_length()), layer.state.num_real_tokens
    marked = attention_mask[:, :seen].to(torch.bool).sum(dim=1).to(before.device)
    # The sequences of a pool are as long as each is, and their masks begin with the new tokens.
    if marked.shape != before.shape or int(before.max()) > seen:
        return
    if not bool((marked == before).all()):
        row = int((marked != before).nonzero()[0])
        raise ValueError(
            f"attention_mask marks {int(marked[row])} of the {seen} tokens seen of sequence {row}"
            f" as text, and {int(before[row])} of them are; the others are padding. Instead,"
            f" {_REMEDY}."
        )


def check_window(layer: BaseLayer, length: int) -> None:
    """Refuse a block with ranks beyond the model's context window."""
    window, chunk = layer.position_rule.window, layer.position_rule.chunk
    if window is None:
        return
    budget = max(tokens.total for tokens in layer.state.budgets)
    if layer.span > 1 and budget + layer.span > window:
        raise ValueError(
            f"positions='rolling': a budget of {budget} tokens and evict_every={layer.span}"
            f" must fit into the model's window of {window}; lower heavy, recent or evict_every."
        )
    if budget >= window:
        raise ValueError(
            f"positions='rolling' with a budget of {budget} tokens leaves no room for a new one in "
            f"the model's window of {window}; lower heavy, recent or sink."
        )
    block = length if chunk is None else min(length, chunk)
    num_cached = int((layer.state.positions >= 0).sum(dim=-1).max()) if layer.holds_entries else 0
    # What is there when the last block comes.
    num_cached = min(budget, num_cached + length - block)
    if num_cached + block > window:
        raise ValueError(
            f"positions='rolling' cannot place a block of {block} tokens after {num_cached} "
            f"entries in the model's window of {window}; give "
            f"H2OCache(evict_every={window - budget}) or less."
        )


def check_integrity(layer: BaseLayer) -> None:
    """Check a layer's entries against the contract."""
    layer.require_attention()
    state, newest = layer.state, layer.newest()
    positions, scores = state.by_head("positions", "scores")
    is_entry = positions >= 0
    counts = is_entry.sum(dim=-1, keepdim=True)
    expected = newest + 1
    if layer.rule.evicts:
        # Tokens of a span that has not ended are all there.
        phase = torch.tensor(state.phases(layer.span), device=state.device).view(-1, 1, 1)
        expected = torch.minimum(expected - phase, state.total) + phase
    ordered = positions.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    protected = protected_entries(positions, newest, state.sink, state.recent) & is_entry
    due = torch.minimum(newest + 1, state.sink + state.recent)
    is_wrong = counts != expected
    if state.has_gaps or layer.rule.grows:  # or a budget's steps
        is_wrong, due = counts > expected, due * (not state.has_gaps)
    problems = {
        "holds another number of entries than the budget": is_wrong,
        "holds a token twice": twice,
        "holds a token that it has not seen": positions > newest,
        "lost a sink or a recent token": protected.sum(dim=-1, keepdim=True) < due,
        "has a score that is negative or not a number": is_entry & ~(scores >= 0),
    }
    if state.ranks is not None:
        is_misplaced = is_entry & (state.ranks != ranks_of(positions))
        problems["holds an entry at another place than its rank"] = is_misplaced
    for problem, is_wrong in problems.items():
        if bool(is_wrong.any()):
            raise ValueError(f"layer {layer.layer_idx} {problem}; call cache.reset().")
