"""A long text is read once, kept in a file, and many prompts go on from it at once."""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import sample_prompt
from h2okv.cache.argument import CACHE  # before transformers 5.24 not `cache`
from h2okv.integration.models import resolve_model

path = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "bundled")
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
    **{CACHE: many},
    max_new_tokens=20,
    do_sample=False,
)
for row in tokenizer.batch_decode(output):
    print("...", row)
