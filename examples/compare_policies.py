"""One prompt, six policies, as many entries: python examples/compare_policies.py [smollm2]."""

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
paragraphs = "\n\n".join(sample_article().split("\n\n")[:3])
question = f"{paragraphs}\nSummarize this in one sentence."
# By the chat template, or as a plain dialogue for a model that has none.
ids = torch.tensor([encode(tokenizer, [{"role": "user", "content": question}])])

for policy in ("full", "h2o", "sink_recent", "recent", "snapkv", "random"):
    cache = h2okv.H2OCache(model.config, heavy=64, recent=64, sink=4, policy=policy)
    output = model.generate(ids, **{CACHE: cache}, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).replace("\n", " ")
    print(f"{policy:11} {cache.num_cached_tokens:5} entries  {text}")
