"""Many prompts at once on rows of cache: python examples/many_prompts.py [MODEL]."""

import sys

import h2okv

prompts = [
    "The old house at the end of the street",
    "In the spring of that year",
    "He opened the letter and",
    "There was once a king who",
]
model = sys.argv[1] if len(sys.argv) > 1 else "bundled"
with h2okv.LLM(model, heavy=32, recent=32, max_num_seqs=3) as llm:
    print(llm.describe(), end="\n\n")
    # Three rows for four prompts: the last one takes the first row that is given back.
    params = h2okv.SamplingParams(max_tokens=24, temperature=0.7, seed=1, stop=("\n\n",))
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        print(f"{prompt}{output.text} [{output.completions[0].finish_reason}]\n")
