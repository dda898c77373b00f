"""Check that a tensor-parallel model gives the results of the full one. Under torchrun; not timed.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py

The bundled model in fp32 reads 1,000 random tokens and takes 200 steps with known tokens, whole and
in parts, and generates 200 tokens from the same prompt. Printed: the largest difference of two
logits, the largest logit, whether the generated tokens are the same, and the KV heads of a rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.models.loading import describe, load_weights

PROMPT, STEPS = 1000, 200


@torch.no_grad()
def run(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits of the prompt's end and of each step, generated tokens, and the cache's KV heads."""
    cache = h2okv.H2OCache(model.config)
    prompt = ids[:, :PROMPT]
    with h2okv.enable(model):
        logits = [model(prompt, **{CACHE: cache}, logits_to_keep=1).logits[:, -1]]
        for index in range(PROMPT, PROMPT + STEPS):
            token = ids[:, index : index + 1]
            logits.append(model(token, **{CACHE: cache}).logits[:, -1])
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{CACHE: h2okv.H2OCache(model.config)},
            max_new_tokens=STEPS,
            do_sample=False,
        )
    return torch.cat(logits), generated, cache.layers[0].keys.shape[1]


def main() -> None:
    """Run the model both ways on every rank; the first one prints."""
    described, device = describe("bundled"), torch.device("cpu")
    split = load_weights(described, torch.float32, device, tensor_parallel=True)
    ids = torch.randint(5, 4000, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))
    logits, tokens, heads = run(split, ids)
    full_logits, expected, all_heads = run(load_weights(described, torch.float32, device), ids)
    if dist.get_rank() == 0:
        difference, largest = (logits - full_logits).abs().max(), full_logits.abs().max()
        print(f"{dist.get_world_size()} ranks with {heads} of {all_heads} KV heads each")
        print(f"largest difference {float(difference):.1e} of logits up to {float(largest):.1f}")
        print(f"the same {STEPS} tokens: {torch.equal(tokens, expected)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
