"""A chat on one cache that never grows, in rolling positions: python examples/conversation.py."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.cache.argument import CACHE  # before transformers 5.24 not `cache`
from h2okv.integration.chat_template import chat_text
from h2okv.integration.models import resolve_model

path = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "bundled")  # or smollm2
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")

cache = h2okv.H2OCache(model.config, heavy=64, recent=64, positions="rolling", prefill_chunk=256)
messages, read, unread = [], 0, []
for turn in ("What is the capital of France?", "And of Italy?", "Which of the two is larger?"):
    messages.append({"role": "user", "content": turn})
    # By the chat template, or as a plain dialogue for a model that has none.
    text = chat_text(tokenizer, messages)
    # Only what is new goes through the model; the rest is in the cache, or was evicted.
    new = tokenizer(text[read:], add_special_tokens=False, return_tensors="pt").input_ids
    new = new.new_tensor([unread + new[0].tolist()])
    output = model.generate(
        **cache.next_turn(new), **{CACHE: cache}, max_new_tokens=24, do_sample=False
    )
    ids = output[0, new.shape[1] :].tolist()
    answer = tokenizer.decode(ids, skip_special_tokens=True).strip()
    # The last token of an answer has not been through the model yet; its end is in the template.
    unread = [] if ids[-1] == tokenizer.eos_token_id else ids[-1:]
    messages.append({"role": "assistant", "content": answer})
    transcript = chat_text(tokenizer, messages, to_answer=False)
    read = transcript.rindex(answer) + len(answer)
    print(f"{turn}\n  {answer}")
    print(f"  [{cache.num_seen_tokens} tokens seen, {cache.num_cached_tokens} held]")
