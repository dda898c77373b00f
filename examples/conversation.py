"""A chat on one cache that never grows: python examples/conversation.py [MODEL]."""

import sys

import h2okv

# First: h2okv models pull smollm2
model, tokenizer = h2okv.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")

cache = h2okv.H2OCache(model, heavy=32, recent=32, positions="rolling", evict_every=256)
messages, read, unread = [], 0, []
for turn in ("What is the capital of France?", "And of Italy?", "Which of the two is larger?"):
    messages.append({"role": "user", "content": turn})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Only what is new goes through the model; the rest is in the cache, or was evicted.
    new = tokenizer(text[read:], add_special_tokens=False, return_tensors="pt").input_ids
    new = new.new_tensor([unread + new[0].tolist()]).to(model.device)
    # Before transformers 5.24: past_key_values=cache.
    output = model.generate(**cache.next_turn(new), cache=cache, max_new_tokens=48, do_sample=False)
    ids = output[0, new.shape[1] :].tolist()
    answer = tokenizer.decode(ids, skip_special_tokens=True).strip()
    # The last token of an answer has not been through the model yet; its end is in the template.
    unread = [] if ids[-1] == tokenizer.eos_token_id else ids[-1:]
    messages.append({"role": "assistant", "content": answer})
    transcript = tokenizer.apply_chat_template(messages, tokenize=False)
    read = transcript.rindex(answer) + len(answer)
    print(f"{turn}\n  {answer}")
    print(f"  [{cache.num_seen_tokens} tokens seen, {cache.num_cached_tokens} in the cache]")
