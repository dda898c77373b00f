"""Prompts of different lengths in one batch, each row as if it were alone."""

import sys

import h2okv

# First: h2okv models pull smollm2
model, tokenizer = h2okv.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")

prompts = ["The old house stood", "She took the letter from the table and read it slowly, for"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
cache = h2okv.H2OCache(model, heavy=16, recent=16)
# Before transformers 5.24: past_key_values=cache.
output = model.generate(**inputs, cache=cache, max_new_tokens=30, do_sample=False)

for text in tokenizer.batch_decode(output, skip_special_tokens=True):
    print("-", text.replace("\n", " "))
for row, heads in enumerate(cache.kept_positions(layer_idx=0)):
    positions = sorted(position for position in heads[0].tolist() if position >= 0)
    print(f"row {row}, head 0 keeps the positions {positions}")
