"""A model, its chat template and an H2O cache: python examples/generate.py [MODEL]."""

import sys

import h2okv

# First: h2okv models pull smollm2
model, tokenizer = h2okv.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
question = f"{h2okv.sample_article()}\nWrite a short summary of this article for a newsletter."
chat = [{"role": "user", "content": question}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
inputs = inputs.to(model.device)

cache = h2okv.H2OCache(model, budget=0.2)
# Before transformers 5.24: past_key_values=cache.
output = model.generate(**inputs, cache=cache, max_new_tokens=48, do_sample=False)

print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print(f"\n{cache.nbytes:,} bytes; a full cache: {cache.full_nbytes:,}")
