"""A model, its chat template and an H2O cache: python examples/generate.py [smollm2]."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import sample_article
from h2okv.cache.argument import CACHE  # before transformers 5.24 not `cache`
from h2okv.integration.chat_template import encode
from h2okv.integration.models import resolve_model

path = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "bundled")
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")
question = f"{sample_article()}\nWrite a short summary of this article for a newsletter."
# By the chat template, or as a plain dialogue for a model that has none.
ids = torch.tensor([encode(tokenizer, [{"role": "user", "content": question}])])

cache = h2okv.H2OCache(model.config, heavy=0.1, recent=0.1)
output = model.generate(ids, **{CACHE: cache}, max_new_tokens=48, do_sample=False)

print(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
print(f"\n{cache.nbytes:,} bytes held; a full cache would hold {cache.full_nbytes:,}.")
