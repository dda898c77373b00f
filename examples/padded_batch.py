"""Prompts of different lengths in one batch: each row as if it were alone, by its own budget."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.cache.argument import CACHE  # before transformers 5.24 not `cache`
from h2okv.integration.models import resolve_model

path = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "bundled")
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(path)

prompts = ["The old house stood", "She took the letter from the table and read it slowly, for"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
cache = h2okv.H2OCache(model.config, heavy=8, recent=8)
with h2okv.enable(model):  # for a model that is already loaded
    output = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=30, do_sample=False)

for text in tokenizer.batch_decode(output, skip_special_tokens=True):
    print("-", text.replace("\n", " "))
for row, heads in enumerate(cache.kept_positions(layer_idx=0)):
    print(f"row {row}, head 0 holds {sorted(p for p in heads[0].tolist() if p >= 0)}")
