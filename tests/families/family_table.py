"""The model families that H2O is tested on: one tiny random config for each, and how it is listed.

`test_exactness.py` runs every row; `support_table.py` writes the README's table from it. A row
belongs here only if it needs no looser test than the others.
"""

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 89
WINDOW = 8  # far below the prompt of the tests, so that sliding windows matter

_LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_WIDE_HEADS = {"head_dim": 12}  # not hidden_size / heads: the configs that set it must be heard
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _rope(kind: str, **options: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


_LATENT = "MLA: latents of one kept set for all heads"
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
_YARN = _rope(
    "yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0
)


@dataclass(frozen=True, eq=False)
class Family:
    """One line of the support table.

    Attributes:
        name: as users call it.
        model_type: transformers' name.
        options: of the tiny config, beside the common ones.
        kv_heads: numbers of KV heads to test, of 4 query heads; ``None`` where a config has none.
        padding: why a row of a padded batch does not give what it gives alone, with the full cache
            neither; empty if it does.
        note: for the table.
    """

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    kv_heads: tuple[int, ...] | None = (4, 2)
    padding: str = ""
    note: str = ""


_SINKS = _SLIDING | {"head_dim": 8}
_SINKS_NOTE = "learned sinks; sliding layers beside full ones"
_GPT_2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48}
_DYNAMIC = "dynamic scaling follows the longest row of the batch"

FAMILIES = (
    Family("OPT", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}, None),
    Family("LLaMA 1, LLaMA 2", "llama"),
    Family("LLaMA, linear RoPE scaling", "llama", _rope("linear", factor=2.0)),
    Family(
        "LLaMA, dynamic RoPE scaling",
        "llama",
        _rope("dynamic", factor=2.0) | {"max_position_embeddings": 30},
        padding=_DYNAMIC,
        note=f"padded batches as with the full cache: {_DYNAMIC}",
    ),
    Family(
        "LLaMA 3",
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        note="llama3 RoPE scaling",
    ),
    Family("LLaMA, YaRN", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    Family(
        "Llama 4 (text)",
        "llama4_text",
        {
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],
        },
        note="chunked layers keep transformers' cache",
    ),
    Family("GPT-NeoX, Pythia", "gpt_neox", {"rotary_pct": 0.5}, None),
    Family("Mistral", "mistral", {"sliding_window": None}, note="without a sliding window"),
    Family(
        "Ministral", "ministral", _SLIDING | _WIDE_HEADS, note="sliding layers beside full ones"
    ),
    Family(
        "Ministral 3",
        "ministral3",
        # From token 48 on, queries grow with their position.
        _rope("yarn", factor=4.0, original_max_position_embeddings=48, llama_4_scaling_beta=0.5),
        note="YaRN; queries grow with their position",
    ),
    Family("Mixtral", "mixtral", {"num_local_experts": 4, "sliding_window": None}),
    Family("Qwen2", "qwen2"),
    Family(
        "Qwen2, sliding layers",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING["layer_types"],
        },
    ),
    Family("Qwen2-MoE", "qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 24}),
    Family("Qwen3", "qwen3", _WIDE_HEADS),
    Family("Qwen3-MoE", "qwen3_moe", _EXPERTS | _WIDE_HEADS),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        _EXPERTS | _LINEAR | _DELTA_NET | {"head_dim": 16, "shared_expert_intermediate_size": 24},
        note="linear layers keep transformers' state",
    ),
    Family("Gemma", "gemma", _WIDE_HEADS),
    Family(
        "Gemma 2",
        "gemma2",
        _SLIDING | _WIDE_HEADS | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 4},
        note="soft-capped logits; sliding layers beside full ones",
    ),
    Family(
        "Gemma 3 (text)",
        "gemma3_text",
        _SLIDING | _WIDE_HEADS | {"query_pre_attn_scalar": 4},
        note="sliding layers beside full ones",
    ),
    Family(
        "Gemma 4 (text)",
        "gemma4_text",
        _SLIDING
        | {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": VOCABULARY},
        note="sliding layers beside full ones; without shared layers",
    ),
    Family("Phi-1, Phi-2", "phi", {"partial_rotary_factor": 0.5}),
    Family("Phi-3, Phi-4", "phi3", {"sliding_window": None}, note="without a sliding window"),
    Family("Phi-3.5-MoE", "phimoe", {"num_local_experts": 4, "sliding_window": None}),
    Family("GPT-2", "gpt2", _GPT_2, None),
    Family(
        "GPT-2, scaled by layer",
        "gpt2",
        _GPT_2 | {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        None,
    ),
    Family("GPT-BigCode, StarCoder", "gpt_bigcode", _GPT_2, None, note="one KV head"),
    Family("StarCoder2", "starcoder2", {"sliding_window": None}, note="without a sliding window"),
    Family("StableLM", "stablelm", {"partial_rotary_factor": 0.5}),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", _SLIDING, note="sliding layers beside full ones"),
    Family("OLMoE", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("Cohere Command R", "cohere", {"logit_scale": 4.0}),
    Family(
        "Cohere Command R7B, A",
        "cohere2",
        _SLIDING | {"logit_scale": 4.0},
        note="sliding layers beside full ones",
    ),
    Family("Granite 3", "granite", {"attention_multiplier": 0.35}),
    Family("Granite MoE", "granitemoe", {"num_local_experts": 4, "attention_multiplier": 0.35}),
    Family(
        "DeepSeek-V2",
        "deepseek_v2",
        _MLA
        | {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24},
        None,
        note=_LATENT,
    ),
    Family(
        "DeepSeek-V3, R1, Kimi K2",
        "deepseek_v3",
        _MLA | _ROUTED | {"first_k_dense_replace": 1} | _YARN,
        None,
        note=f"{_LATENT}; YaRN",
    ),
    Family("MiniCPM3", "minicpm3", _MLA, None, note=_LATENT),
    Family("GLM-4.7-Flash", "glm4_moe_lite", _MLA | _ROUTED, None, note=_LATENT),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("GLM-4", "glm4", {"head_dim": 8}),
    Family(
        "EXAONE 4", "exaone4", _SLIDING | {"head_dim": 8}, note="sliding layers beside full ones"
    ),
    Family("Nemotron", "nemotron", {"head_dim": 8}),
    Family("Seed-OSS", "seed_oss", {"head_dim": 8}),
    Family("Apertus", "apertus"),
    Family("NanoChat", "nanochat", note="rotates by minus the angle"),
    Family("ERNIE 4.5", "ernie4_5", {"head_dim": 8}),
    Family(
        "gpt-oss",
        "gpt_oss",
        _SINKS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        note=_SINKS_NOTE,
    ),
    Family(
        "Flint",
        "flint",
        _SINKS | _EXPERTS | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
        note=_SINKS_NOTE,
    ),
    Family("Granite SWA", "granite_swa", _SINKS | {"attention_multiplier": 0.35}, note=_SINKS_NOTE),
    Family(
        "Granite MoE SWA",
        "granitemoe_swa",
        _SINKS | {"num_local_experts": 4, "attention_multiplier": 0.35},
        note=_SINKS_NOTE,
    ),
    Family(
        "MiMo-V2-Flash",
        "mimo_v2_flash",
        _SINKS
        | {
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        (2,),
        note="learned sinks in sliding layers, which have twice the KV heads",
    ),
    Family(
        "LFM2",
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        note="convolution layers keep transformers' state",
    ),
)


def variants() -> list[tuple[Family, int | None]]:
    """Yield every family with each number of KV heads."""
    return [(family, heads) for family in FAMILIES for heads in family.kv_heads or (None,)]


def variant_id(variant: tuple[Family, int | None]) -> str:
    family, heads = variant
    words = family.name.lower().replace("(", "").replace(")", "").replace(",", "").split()
    return "-".join(words + ([] if heads is None else ["mha" if heads == 4 else "gqa"]))


def config_options(family: Family, kv_heads: int | None) -> dict[str, Any]:
    """Everything that the family's tiny config is made with."""
    options = _LLAMA_LIKE | {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        # Large weights make attention far from uniform, so that evictions matter and are no ties.
        "initializer_range": 0.3,
    }
    if kv_heads is not None:
        options["num_key_value_heads"] = kv_heads
    return options | family.options
