"""Turn after turn on one cache that never grows; positions roll, so it may go on for ever."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path

path = bundled_model_path()
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")

cache = h2okv.H2OCache(model.config, heavy=64, recent=64, positions="rolling", prefill_chunk=256)
turns = ["The old house stood at the end of the lane.", " No one had lived there for years."]
unread = [tokenizer.bos_token_id]
for turn in turns * 3:
    # The last token of an answer has not been through the model yet, so it comes first.
    new = torch.tensor([unread + tokenizer(turn, add_special_tokens=False).input_ids])
    output = model.generate(
        **cache.next_turn(new), past_key_values=cache, max_new_tokens=24, do_sample=False
    )
    answer = output[0, new.shape[1] :].tolist()
    unread = answer[-1:]
    print(turn, tokenizer.decode(answer))
    print(f"   [{cache.num_seen_tokens} tokens seen, {cache.num_cached_tokens} held]")
