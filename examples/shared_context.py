"""A long text is read once, stored in a file, and three answers continue from it at once."""

import sys
import tempfile
from pathlib import Path

import torch

import h2okv

# First: h2okv models pull smollm2
model, tokenizer = h2okv.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
question = f"{h2okv.sample_article()}\nWhat is this article about? Answer in one sentence."
chat = [{"role": "user", "content": question}]
context = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")

cache = h2okv.H2OCache(model, heavy=128, recent=128, positions="rolling", evict_every=512)
h2okv.prefill(model, context.input_ids, cache)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "context.safetensors"
    cache.save(file)
    print(f"{cache.num_seen_tokens} tokens read, {file.stat().st_size:,} bytes on disk")
    cache = h2okv.H2OCache.load(file, model)

words = ["The", "A", "In"]  # each begins one answer
prompts = [tokenizer(word, add_special_tokens=False).input_ids[:1] for word in words]
prompts = torch.tensor(prompts, device=model.device)
many = cache.fork(len(words))
# Before transformers 5.24: past_key_values=many.
output = model.generate(**many.next_turn(prompts), cache=many, max_new_tokens=32, do_sample=False)
for text in tokenizer.batch_decode(output, skip_special_tokens=True):
    print("-", text.replace("\n", " "))
