"""Lets the tests of this folder import their table, and says which rows the quick run takes."""

import sys
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from h2okv.cache.argument import CACHE

# pytest's importlib mode adds no folder.
sys.path.insert(0, str(Path(__file__).parent))

# One for each kind of attention: learned positions, RoPE, dynamic and partial RoPE, chunked,
# sliding and soft-capped layers, one KV head, latents, layers with a state or without RoPE, images.
QUICK = {
    "OPT", "LLaMA 1, LLaMA 2", "LLaMA, dynamic RoPE scaling", "GPT-NeoX, Pythia", "Llama 4 (text)",
    "Gemma 2", "GPT-BigCode, StarCoder", "Qwen3-Next", "LFM2", "SmolLM3", "Phi-3, LongRoPE",
    "DeepSeek-V3, R1, Kimi K2", "Llava", "Gemma 3", "Qwen2.5-VL",
}  # fmt: skip
# With the commands' default besides: pairs of neighbours, complex numbers, positions that queries
# grow with, minus the angle, learned sinks.
QUICK_DEFAULTS = QUICK | {"GLM-4", "DeepSeek-V2", "Ministral 3", "NanoChat", "gpt-oss"}


def pytest_collection_modifyitems(items):
    """Marks the other families as slow, and of each family all but grouped queries."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent != Path(__file__).parent or not {"variant", "family"} & {*parameters}:
            continue
        family, heads = parameters.get("variant", (parameters.get("family"), None))
        is_latent = family.note.startswith("MLA") and CACHE != "cache"
        if is_latent or family.model_type not in CONFIG_MAPPING:
            item.add_marker(pytest.mark.skip("needs a newer transformers"))
        both = family.name == "LLaMA 1, LLaMA 2"
        quick = QUICK_DEFAULTS if item.path.stem == "test_defaults" else QUICK
        if family.name not in quick or (heads == 4 and not both):
            item.add_marker(pytest.mark.slow)
