"""Builds a family's tiny model and drives it through a fixed sequence of blocks."""

import inspect
from copy import deepcopy
from functools import lru_cache

import torch
from family_table import VOCABULARY, Family, config_options
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

import h2okv
from h2okv.cache.argument import CACHE

PROMPT = 40
# A prompt, single tokens, a second turn of several tokens, single tokens again.
BLOCKS = (PROMPT, 1, 1, 1, 1, 1, 7, 1, 1)
TOLERANCE = 2e-4


@lru_cache(maxsize=4)
def tiny_model(family: Family, kv_heads: int | None) -> PreTrainedModel:
    """Return the family's random model."""
    config = AutoConfig.for_model(family.model_type, **config_options(family, kv_heads))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):  # which some types begin with zero
            torch.nn.init.normal_(parameter, mean=4.0, std=2.0)
    return model


def _fresh(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model: dynamic RoPE scaling remembers the longest text that a model has seen."""
    return deepcopy(model)


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random text without special tokens, ``[rows, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def full_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


@torch.no_grad()
def forced_logits(
    model: PreTrainedModel,
    cache: Cache,
    attention: str,
    blocks: tuple[int, ...] = BLOCKS,
    seed: int = 1,
) -> torch.Tensor:
    """Logits of two rows of fixed text, read block by block."""
    model = _fresh(model)
    model.set_attn_implementation(attention)
    ids = tokens(2, sum(blocks), seed)
    logits, start = [], 0
    # Some models forget the past in the positions that they make themselves.
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    for size in blocks:
        block = ids[:, start : start + size]
        options = (
            {"position_ids": torch.arange(start, start + size)[None]} if takes_positions else {}
        )
        logits.append(model(block, **{CACHE: cache}, use_cache=True, **options).logits)
        start += size
    return torch.cat(logits, dim=1)


def generate(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache, attention: str, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Six greedy tokens: (ids ``[B, 6]``, their logits ``[B, 6, V]``)."""
    model = _fresh(model)
    model.set_attn_implementation(attention)
    output = model.generate(
        ids, past_key_values=cache, max_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1)


@torch.no_grad()
def most_likely(model: PreTrainedModel, ids: torch.Tensor, answer: list[int]) -> list[int]:
    """Return the most likely token before each of an answer's, by eager attention."""
    model = _fresh(model)
    model.set_attn_implementation("eager")
    text = torch.cat([ids, torch.tensor([answer[:-1]], dtype=ids.dtype)], dim=1)
    logits = model(text, use_cache=False).logits
    return logits[0, ids.shape[1] - 1 :].argmax(-1).tolist()


@torch.no_grad()
def factors_by_head(model: PreTrainedModel) -> list[list[float]]:
    """Return factors on heavy, of mean 1, for each KV head of each layer with H2O entries."""
    cache = h2okv.H2OCache(model.config)
    model = _fresh(model)
    with h2okv.enable(model):
        model(tokens(1, 5), **{CACHE: cache})
    heads = [layer.num_kv_heads for layer in cache._scored]
    factors = [1.5 if number % 2 else 0.5 for number in range(sum(heads))]
    if len(factors) % 2:
        factors[-1] = 1.0
    remaining = iter(factors)
    return [[next(remaining) for _ in range(count)] for count in heads]


def kept_sets(cache: h2okv.H2OCache) -> dict[int, list[list[set[int]]]]:
    """Return the positions in each full-attention layer, for each row and head."""
    sets = {}
    for layer in cache._scored:
        positions = cache.kept_positions(layer.layer_idx).tolist()
        sets[layer.layer_idx] = [[{p for p in head if p >= 0} for head in row] for row in positions]
    return sets
