"""Tries H2O on every causal LM of the installed transformers, with a tiny config made by rules.

python tests/families/walk.py TYPE ...    say what these types do
python tests/families/walk.py --write     try all, and write walk.toml and docs/support-table.md
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers

FOLDER = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(FOLDER.parents[1] / "src"), str(FOLDER)]

from family_harness import factors_by_head, forced_logits, kept_sets  # noqa: E402
from family_table import VOCABULARY  # noqa: E402
from oracle import cache_of  # noqa: E402
from transformers import (  # noqa: E402
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

import h2okv  # noqa: E402
from h2okv.cache.linear_states import continues_prompts  # noqa: E402

RESULTS = FOLDER / "walk.toml"
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
BLOCKS = (40, 1, 1, 1, 7, 1, 1)
TOLERANCE = 1e-4  # of logits, of their largest number if that is above 1
_BEST = {"policy": "best", "heavy": 6, "recent": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "h2o": {"heavy": 6, "recent": 4, "sink": 1},
    # The commands' default, with factors by head, and what they add to it.
    "best": _BEST,
    "evict_every": _BEST | {"evict_every": 6},
    "kv_bits": _BEST | {"evict_every": 6, "kv_bits": 4},
    "rolling": _BEST | {"evict_every": 6, "positions": "rolling"},
}
# Numbers of a config by their names, first match first; what none matches stays.
_RULES = (
    (r"initializer_range", 0.3), (r"pad_token_id", 0), (r"bos_token_id", 1), (r"eos_token_id", 2),
    (r"(sliding_window|window_size|chunk_size|chunk_length|local_attention|index_topk)", 8),
    (r"vocab", VOCABULARY),
    (r"(position_embeddings|n_positions|n_ctx|max_seq_len|max_length)$", 256),
    (r"first_k_dense|num_nextn|num_kv_shared", 0),
    (r"mamba_(n|num)_heads$|linear_num_value_heads", 8),
    (r"(key_value|kv|query_groups|linear_num_key|linear_key).*heads|num_query_groups", 2),
    (r"(^|_)(heads|n_head)$", 4), (r"experts_per_tok|top_?k$", 2), (r"experts$", 4),
    (r"n_group|topk_group|shared_experts", 1), (r"(layers|n_layer|num_blocks)$", 4),
    (r"(head_dim|head_size|kv_channels|d_head|dim_head|d_kv|headdim)$", 8),
    (r"rotary_dim|d_rel", 8), (r"intermediate|ffn|d_ff|dim_ff|dff|inner|feed_forward", 48),
    (r"hidden_size|d_model|n_embd|embedding_size|embd|emb_dim|hidden_dim|word_embed", 32),
    (r"rank", 16), (r"d_state|state_size", 8),
)  # fmt: skip


# Of latent attention; all sizes are different.
_LATENT = {"num_key_value_heads": 4, "qk_nope_head_dim": 12, "v_head_dim": 10, "kv_lora_rank": 16}
# Fields that the rules cannot know, by model type.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_attention_heads": 4},
    "ernie4_5_moe": {"moe_k": 2},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_hidden_layers": 30,
            "num_kv_shared_layers": 30,
        }
    },
    "gemma3n": {"text_config": {"num_kv_shared_layers": 2}},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"initializer_range": 0.1},  # loops magnify what rounding leaves
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mistral": {"sliding_window": None},
    "nemotron": {"num_key_value_heads": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}


def tiny_options(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return small numbers for a config's fields that have large ones."""
    special = _SPECIAL.get(kind.model_type, {})
    try:
        default = kind()
    except Exception:  # of a validator
        default = kind(**special)
    options: dict[str, Any] = {}
    fields = {field.name for field in dataclasses.fields(kind)}
    for name in fields:
        try:
            value = getattr(default, name, None)
        except RuntimeError:  # it differs by layer
            continue
        if isinstance(value, PreTrainedConfig):
            options[name] = {"model_type": value.model_type, **tiny_options(type(value))}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            rule = next((new for rule, new in _RULES if re.search(rule, name)), None)
            if rule is not None and (value > rule or name == "initializer_range"):
                options[name] = rule
        elif name == "head_dim":
            options[name] = 8
    layer_types = getattr(default, "layer_types", None)
    if layer_types and "layer_types" in fields:  # each kind, the last one of the model last
        kinds = list(dict.fromkeys(reversed(layer_types)))[::-1]
        options["layer_types"] = (kinds * 4)[-4:]
    if "kv_lora_rank" in fields:
        sizes = _LATENT | {"qk_head_dim": 20}
        options |= {name: size for name, size in sizes.items() if name in fields}
    return options | special


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Make a type's config small."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**tiny_options(kind))


def results() -> dict[str, Any]:
    """Read what was found when the table was written."""
    return tomllib.loads(RESULTS.read_text(encoding="utf-8"))


def summary(outcomes: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """Group outcomes by type as `results` has them; of reasons what differs by type is left out."""
    refused, without = defaultdict(list), defaultdict(list)
    for model_type, (kind, why) in sorted(outcomes.items()):
        if kind == "refused":
            refused[_reason(why)].append(model_type)
        elif kind == "works":
            for setting in why:
                without[setting].append(model_type)
    return {
        "transformers": transformers.__version__,
        "works": " ".join(t for t, (kind, _) in sorted(outcomes.items()) if kind == "works"),
        "not_tiny": " ".join(t for t, (kind, _) in sorted(outcomes.items()) if kind == "not tiny"),
        "without": {setting: " ".join(types) for setting, types in sorted(without.items())},
        "refused": {reason: " ".join(types) for reason, types in sorted(refused.items())},
    }


def _reason(message: str) -> str:
    """Cut the reason out of a refusal."""
    message = message.removeprefix("ValueError: ").partition("; use transformers' own cache")[0]
    message = re.sub(r"^model type '[^']+' (is not supported: )?", "", message)
    return re.sub(r" \([^()]*Layer[^()]*\)", "", message)


def outcome(model_type: str) -> tuple[str, Any]:
    """Tell what a type does: ``works``, ``refused``, ``not tiny`` or ``wrong``, and why.

    Of a type that works, the settings that it refuses with the words of the refusal.
    """
    try:
        config = tiny_config(model_type)
    except Exception as error:
        return "not tiny", _line(error)
    try:
        cache_of(config)
    except ValueError as error:
        is_ours = "use transformers' own cache" in str(error)
        return "refused" if is_ours else "wrong", _line(error)
    except Exception as error:
        return "wrong", _line(error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            size = sum(parameter.numel() for parameter in model.parameters())
            if size > 5_000_000:
                return "not tiny", f"{size} parameters"
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            blocks = BLOCKS
            if not continues_prompts(cache_of(config)):  # it refuses a block after others
                blocks = (BLOCKS[0], *[1] * sum(BLOCKS[1:]))
            expected = forced_logits(model, DynamicCache(config=model.config), "eager", blocks)
    except Exception as error:
        return "not tiny", _line(error)
    refused: dict[str, str] = {}
    try:
        factors = factors_by_head(model)
        for name, setting in SETTINGS.items():
            options = setting
            if setting is not SETTINGS["h2o"]:
                options = setting | {"layer_budgets": factors}
            if name == "rolling":  # heads of a layer hold alike
                options["layer_budgets"] = _by_layer(len(factors))
            try:
                cache_of(model, **options)
            except ValueError as error:
                refused[name] = _line(error).removeprefix("ValueError: ")
                continue
            _try_setting(model, blocks, expected, options)
    except Exception as error:
        return "wrong", f"{name}: {_line(error)}"
    return "works", refused


def _by_layer(count: int) -> list[float]:
    factors = [1.5 if number % 2 else 0.5 for number in range(count)]
    return factors if count % 2 == 0 else [*factors[:-1], 1.0]


def _try_setting(
    model: Any, blocks: tuple[int, ...], expected: torch.Tensor, options: dict[str, Any]
) -> None:
    """Compare what drops with what masks, and a budget above the text with the full cache."""
    if "layer_budgets" not in options:
        cache = _compare_with_masking(model, blocks, options)
        assert cache.num_cached_tokens == 11
    else:
        _compare_in_one_text(model, blocks, options)
    if "kv_bits" in options:
        return
    budget = {"heavy": sum(blocks), "recent": sum(blocks)}
    logits = forced_logits(model, cache_of(model, **options | budget), "h2o", blocks)
    _require_close(logits, expected, "a budget above the text differs from the full cache")


def _compare_in_one_text(model: Any, blocks: tuple[int, ...], options: dict[str, Any]) -> None:
    """Compare with masking in up to three texts: two scores, or a code's two steps, may be near."""
    for seed in (1, 2, 3):
        try:
            _compare_with_masking(model, blocks, options, seed)
            return
        except AssertionError:
            if seed == 3:
                raise


def _compare_with_masking(
    model: Any, blocks: tuple[int, ...], options: dict[str, Any], seed: int = 1
) -> h2okv.H2OCache:
    caches = [cache_of(model, **options, masks=masks) for masks in (False, True)]
    logits, masked = (forced_logits(model, cache, "h2o", blocks, seed) for cache in caches)
    _require_close(logits, masked, "dropping differs from masking")
    assert kept_sets(caches[0]) == kept_sets(caches[1]), "dropping keeps other entries"
    caches[0].check_integrity()
    full = forced_logits(model, DynamicCache(config=model.config), "eager", blocks, seed)
    assert (logits - full).abs().max() > 0, "eviction changed nothing"
    return caches[0]


def _require_close(logits: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    assert torch.isfinite(expected).all(), "the full cache gives no finite numbers"
    limit = TOLERANCE * max(1.0, float(expected.abs().max()))
    error = float((logits - expected).abs().max())
    assert error <= limit, f"{message} by {error:.1e}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def main(arguments: list[str]) -> int:
    """Try types, or all and write what they do; returns 1 if one is wrong."""
    outcomes = {}
    for model_type in TYPES if arguments == ["--write"] else arguments:
        outcomes[model_type] = kind, why = outcome(model_type)
        print(f"{kind:9} {model_type:28} {why}", flush=True)
    if arguments == ["--write"]:
        results = summary(outcomes)
        tables = {name: results.pop(name) for name in ("without", "refused")}
        lines = [f'{name} = "{text}"' for name, text in results.items()]
        for name, rows in tables.items():
            lines += ["", f"[{name}]", *(f'"{key}" = "{types}"' for key, types in rows.items())]
        text = "\n".join(["# Written by walk.py: what every causal LM type does.", *lines])
        RESULTS.write_text(text + "\n", encoding="utf-8")
        import support_table

        support_table.main([])
    return int(any(kind == "wrong" for kind, _ in outcomes.values()))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
