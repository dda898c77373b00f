"""Run by ``torchrun``: generates with a sharded model; the first rank writes the results."""

import json
import sys

import torch
import torch.distributed as dist

import h2okv


def main() -> None:
    torch.set_num_threads(1)
    request = json.loads(sys.argv[1])
    with h2okv.LLM(
        request["model"], tensor_parallel=True, dtype=torch.float64, **request["settings"]
    ) as llm:
        heads = llm.engine.runner.pool.cache.layers[0].num_kv_heads
        token_ids = []
        for prompts in request["calls"]:
            params = h2okv.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            outputs = llm.generate(prompts, params)
            token_ids.append([output.completions[0].token_ids for output in outputs])
        if dist.get_rank() == 0:
            result = {
                "token_ids": token_ids,
                "heads": heads,
                "max_num_seqs": llm.engine.max_num_seqs,
            }
            with open(request["output"], "w", encoding="utf-8") as file:
                json.dump(result, file)
    dist.destroy_process_group()


main()
