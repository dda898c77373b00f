"""Times a prompt and decode steps of latent attention (MLA) beside transformers' own cache.

python benchmarks/latent.py [TOKENS]    two layers of DeepSeek-V2-Lite's attention, one thread
"""

import statistics
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import h2okv

STEPS = 15


@torch.inference_mode()
def times(model, cache, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of the prompt, and of a step (the median)."""
    start = time.perf_counter()
    model(ids[:, :-STEPS], cache=cache, logits_to_keep=1)
    prompt = time.perf_counter() - start
    seconds = []
    for position in range(ids.shape[1] - STEPS, ids.shape[1]):
        start = time.perf_counter()
        model(ids[:, position : position + 1], cache=cache)
        seconds.append(time.perf_counter() - start)
    return prompt, statistics.median(seconds)


def main(length: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v2", hidden_size=2048, intermediate_size=2816, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, vocab_size=1000,
        first_k_dense_replace=2, max_position_embeddings=32768,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 1000, (1, length + STEPS))
    fifth = length // 10
    caches = {
        "transformers": lambda: DynamicCache(config=config),
        "H2O, all kept": lambda: h2okv.H2OCache(config, policy="full"),
        "H2O, a fifth": lambda: h2okv.H2OCache(config, heavy=fifth, recent=fifth),
    }
    for name, make_cache in caches.items():
        model.set_attn_implementation("sdpa" if name == "transformers" else "h2o")
        runs = [times(model, make_cache(), ids) for _ in range(3)]
        prompt, step = (statistics.median(values) for values in zip(*runs, strict=True))
        print(f"{name:14} prompt {prompt:6.2f} s, step {1000 * step:7.1f} ms", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096)
