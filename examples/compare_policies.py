"""The same prompt under every policy with the same number of cache entries."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt

path = bundled_model_path()
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")
inputs = tokenizer(sample_prompt(), return_tensors="pt", truncation=True, max_length=900)
length = inputs["input_ids"].shape[1]

for policy in h2okv.policy_names(dropping=True):
    cache = h2okv.H2OCache(model.config, heavy=0.1, recent=0.1, policy=policy)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(output[0, length:]).replace("\n", " ")
    print(f"{policy:13} {cache.num_cached_tokens:5} entries  {text}")
