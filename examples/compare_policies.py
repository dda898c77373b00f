"""One prompt, six policies, as many entries: python examples/compare_policies.py [MODEL]."""

import sys

import h2okv

# First: h2okv models pull smollm2
model, tokenizer = h2okv.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
paragraphs = "\n\n".join(h2okv.sample_article().split("\n\n")[:3])
chat = [{"role": "user", "content": f"{paragraphs}\nSummarize this in one sentence."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
inputs = inputs.to(model.device)

for policy in ("full", "h2o", "sink_recent", "recent", "snapkv", "random"):
    cache = h2okv.H2OCache(model, policy, heavy=64, recent=64, sink=4)
    # Before transformers 5.24: past_key_values=cache.
    output = model.generate(**inputs, cache=cache, max_new_tokens=24, do_sample=False)
    answer = output[0, inputs.input_ids.shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True).replace("\n", " ")
    print(f"{policy:11} {cache.num_cached_tokens:5} entries  {text}")
