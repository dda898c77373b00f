"""An instruct model, its chat template and an H2O cache: python examples/generate.py [MODEL]."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import sample_article
from h2okv.cache.argument import CACHE  # before transformers 5.24 not `cache`
from h2okv.integration.models import resolve_model

path = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")
question = f"{sample_article()}\nWrite a short summary of this article for a newsletter."
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": question}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)  # fmt: skip

cache = h2okv.H2OCache(model.config, heavy=0.1, recent=0.1)
output = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=48, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"\n{cache.nbytes:,} bytes held; a full cache would hold {cache.full_nbytes:,}.")
