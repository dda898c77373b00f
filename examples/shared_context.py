"""A long text is read once, kept in a file, and many prompts go on from it at once."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt

path = bundled_model_path()
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o", dtype=torch.float32)

cache = h2okv.H2OCache(model.config, heavy=128, recent=128, positions="rolling", prefill_chunk=512)
context = tokenizer(sample_prompt(), return_tensors="pt").input_ids
h2okv.prefill(model, context, cache)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "context.safetensors"
    cache.save(file)
    print(f"{context.shape[1]} tokens read, {file.stat().st_size:,} bytes on disk")
    cache = h2okv.H2OCache.load(file, model)

words = [" He", " She", " They"]
prompts = [tokenizer(word, add_special_tokens=False).input_ids[:1] for word in words]
many = cache.fork(len(words))
output = model.generate(
    **many.next_turn(torch.tensor(prompts)),
    cache=many,
    max_new_tokens=20,
    do_sample=False,
)
for row in tokenizer.batch_decode(output):
    print("...", row)
