"""The five lines: a model, an H2O cache, and generate. Run with a model's name, or none."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import sample_prompt
from h2okv.integration.models import resolve_model

path = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "bundled")
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")
inputs = tokenizer(sample_prompt(), return_tensors="pt", truncation=True, max_length=900)

cache = h2okv.H2OCache(model.config, heavy=0.1, recent=0.1)
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=60, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
print(f"\n{cache.nbytes:,} bytes held; a full cache would hold {cache.full_nbytes:,}.")
