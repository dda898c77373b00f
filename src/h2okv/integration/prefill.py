"""`prefill`: reads a long prompt in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.integration.attention import ATTENTION_NAME
from h2okv.integration.enable import enable


def read_blocks(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: H2OCache,
    chunk: int | None = None,
    *,
    all_logits: bool = False,
    attention_mask: Tensor | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Reads tokens onto a cache in blocks, with the memory of one block.

    The cache goes on from where it stands. A budget in fractions is of the whole ``input_ids`` if
    the cache is empty.

    Args:
        model: a loaded model, with H2O attention or without.
        input_ids: int ``[B, T]``, without padding.
        cache: mutated.
        chunk: tokens of a forward; ``cache.prefill_chunk`` if ``None``, and all at once if that is
            ``None`` too.
        all_logits: whether to give the logits of every token, not only of a block's last one.
        attention_mask: ones ``[B, tokens seen + T]``, which say that tokens like the padding
            token's are text; ``None`` to let the model guess.

    Yields:
        ``(read, logits)``: how many of the tokens have been read, and ``[B, c, V]`` or
        ``[B, 1, V]`` in the model's dtype.
    """
    length = input_ids.shape[1]
    if length == 0:
        raise ValueError("input_ids has no tokens; give at least one.")
    chunk = chunk if chunk is not None else cache.prefill_chunk or length
    if chunk < 1:
        raise ValueError(f"chunk={chunk} reads nothing; give 1 or more.")
    cache.expect(length)
    try:
        yield from _forwards(model, input_ids, cache, chunk, all_logits, attention_mask)
    finally:
        cache.expect(None)


def _attending(model: PreTrainedModel, cache: H2OCache) -> AbstractContextManager[Any]:
    """Gives the model H2O attention where it has not."""
    enabled = model.config._attn_implementation == ATTENTION_NAME and not cache.needs_enabling
    return nullcontext() if enabled else enable(model)


def _forwards(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: H2OCache,
    chunk: int,
    all_logits: bool,
    mask: Tensor | None,
) -> Iterator[tuple[int, Tensor]]:
    """The forwards of `read_blocks`."""
    length = input_ids.shape[1]
    before = 0 if mask is None else mask.shape[1] - length
    with _attending(model, cache):
        for start in range(0, length, chunk):
            block = input_ids[:, start : start + chunk].to(model.device)
            read = start + block.shape[1]
            with torch.no_grad():
                logits = model(
                    block,
                    attention_mask=None if mask is None else mask[:, : before + read],
                    past_key_values=cache,
                    logits_to_keep=0 if all_logits else 1,
                ).logits
            yield read, logits


def _check_inputs(input_ids: Tensor, cache: H2OCache) -> None:
    """Refuses what cannot be read onto a cache."""
    if not isinstance(cache, H2OCache):
        raise ValueError(
            f"cache={type(cache).__name__} is no H2OCache; give h2okv.H2OCache(model.config, ...)."
        )
    if not torch.is_tensor(input_ids) or input_ids.dim() != 2:
        given = list(input_ids.shape) if torch.is_tensor(input_ids) else type(input_ids).__name__
        raise ValueError(
            f"input_ids={given} is no batch of tokens; give an int tensor [batch, tokens], such as "
            "tokenizer(text, return_tensors='pt').input_ids."
        )


def prefill(
    model: PreTrainedModel, input_ids: Tensor, cache: H2OCache, attention_mask: Tensor | None = None
) -> Tensor:
    """Reads a prompt, or a further turn, onto a cache in blocks of ``cache.prefill_chunk``.

    Then generate with the whole text, of which transformers takes the part not yet read::

        h2okv.prefill(model, input_ids[:, :-1], cache)
        model.generate(input_ids, past_key_values=cache)

    Args:
        model: a loaded model, with H2O attention or without.
        input_ids: int ``[B, T]``.
        cache: mutated.
        attention_mask: ``[B, tokens seen + T]``, 0 for padding; ``None`` if ``input_ids`` has
            none. A padded batch passes the model in one forward, cut into blocks inside each
            layer, because its rows are cut at different columns.

    Returns:
        Logits of the last token, ``[B, V]``.

    Raises:
        ValueError: if there is nothing to read.
    """
    _check_inputs(input_ids, cache)
    given = attention_mask
    if attention_mask is None:
        attention_mask = cache.next_turn(input_ids)["attention_mask"]
    if bool(attention_mask.to(torch.bool).all()):
        for _, logits in read_blocks(model, input_ids, cache, attention_mask=given):
            last = logits[:, -1]
        return last
    new = attention_mask.long().cumsum(dim=1)[:, -input_ids.shape[1] :] - 1
    with _attending(model, cache), torch.no_grad():
        return model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=new.clamp(min=0),
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
