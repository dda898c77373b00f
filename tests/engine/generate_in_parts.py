"""Run by ``torchrun``: generates with a model in parts; the first rank writes what came of it."""

import json
import sys

import torch
import torch.distributed as dist

import h2okv


def main() -> None:
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    with h2okv.LLM(
        asked["model"], tensor_parallel=True, dtype=torch.float32, **asked["settings"]
    ) as llm:
        heads = llm.engine.runner.pool.cache.layers[0].num_kv_heads
        made = []
        for prompts in asked["calls"]:
            params = h2okv.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            outputs = llm.generate(prompts, params)
            made.append([own.completions[0].token_ids for own in outputs])
        if dist.get_rank() == 0:
            told = {"made": made, "heads": heads, "max_num_seqs": llm.engine.max_num_seqs}
            with open(asked["output"], "w", encoding="utf-8") as file:
                json.dump(told, file)
    dist.destroy_process_group()


main()
