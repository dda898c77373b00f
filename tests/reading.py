"""Texts read in blocks by a cache."""

import torch


def tokens(seed, batch, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


def padding(pads, blocks, holes=0.0, seed=0):
    """Left padding of the prompt, and holes anywhere in the later blocks."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(len(pads), sum(blocks), generator=generator) >= holes).long()
    mask[:, : blocks[0]] = 1
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask


@torch.no_grad()
def run(model, cache, input_ids, blocks, mask=None):
    """Feeds the tokens in blocks; returns the logits of all, ``[B, T, V]``."""
    logits, at, options = [], 0, {}
    for size in blocks:
        block = slice(at, at + size)
        if mask is not None:
            position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, block]
            options = {"attention_mask": mask[:, : at + size], "position_ids": position_ids}
        logits.append(model(input_ids[:, block], past_key_values=cache, **options).logits)
        at += size
    return torch.cat(logits, dim=1)
