"""Many conversations at once on slots of one size: python examples/many_prompts.py [MODEL]."""

import sys

import h2okv

questions = [
    "Name three uses of a paperclip.",
    "Write a haiku about the sea.",
    "Why is the sky blue? Answer in one sentence.",
    "Translate to French: good morning.",
]
model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"  # h2okv models pull smollm2
with h2okv.LLM(model, heavy=64, recent=64, max_num_seqs=3) as llm:
    print(llm.describe(), end="\n\n")
    # Room for three: the fourth begins when one has finished.
    params = h2okv.SamplingParams(max_tokens=48, temperature=0.2, top_p=0.9, seed=1)
    talks = [[{"role": "user", "content": question}] for question in questions]
    for question, output in zip(questions, llm.chat(talks, params), strict=True):
        print(f"{question}\n  {output.text} [{output.completions[0].finish_reason}]\n")
