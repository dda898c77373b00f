"""The same prompt under every policy with the same number of cache entries."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import sample_article
from h2okv.cache.argument import CACHE  # before transformers 5.24 not `cache`
from h2okv.integration.models import resolve_model

path = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")
paragraphs = "\n\n".join(sample_article().split("\n\n")[:3])
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": f"{paragraphs}\nSummarize this in one sentence."}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)  # fmt: skip
length = inputs["input_ids"].shape[1]

for policy in ("full", "h2o", "sink_recent", "recent", "snapkv", "random"):
    cache = h2okv.H2OCache(model.config, heavy=64, recent=64, sink=4, policy=policy)
    output = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(output[0, length:], skip_special_tokens=True).replace("\n", " ")
    print(f"{policy:11} {cache.num_cached_tokens:5} entries  {text}")
