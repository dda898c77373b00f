"""A conversation on one cache that never grows; positions roll, so it may go on for ever."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.cache.argument import CACHE  # before transformers 5.24 not `cache`
from h2okv.integration.models import resolve_model

path = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")

cache = h2okv.H2OCache(model.config, heavy=64, recent=64, positions="rolling", prefill_chunk=256)
messages, read, unread = [], "", []
for turn in ("What is the capital of France?", "And of Italy?", "Which of the two is larger?"):
    messages.append({"role": "user", "content": turn})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Only what is new goes through the model; the rest is in the cache, or was evicted.
    new = tokenizer(text[len(read) :], add_special_tokens=False, return_tensors="pt").input_ids
    new = new.new_tensor([unread + new[0].tolist()])
    output = model.generate(
        **cache.next_turn(new), **{CACHE: cache}, max_new_tokens=24, do_sample=False
    )
    ids = output[0, new.shape[1] :].tolist()
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    # The last token of an answer has not been through the model yet; its end is in the template.
    unread = [] if ids[-1] == tokenizer.eos_token_id else ids[-1:]
    messages.append({"role": "assistant", "content": answer})
    read = text + answer
    print(f"{turn}\n  {answer}")
    print(f"  [{cache.num_seen_tokens} tokens seen, {cache.num_cached_tokens} held]")
