import io
import json
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.calibration import layer_budgets as own_budgets
from h2okv.config import CacheConfig

BUDGET = ("--policy", "h2o", "--budget", "16+16")
RUN_FIELDS = {
    "text": str, "token_ids": list, "finish_reason": str, "time_to_first_token_s": float,
    "tokens_per_second": float, "kv_bytes": int, "kv_bytes_full": int, "num_seen_tokens": int,
    "num_cached_tokens": int, "mean_cached_tokens": float, "smaller_from": int,
}  # fmt: skip
SETTINGS_FIELDS = {
    "model": str, "cache": str, "policy": str, "heavy": int, "recent": float, "sink": int,
    "positions": str, "evict_every": type(None), "whole_prompts": bool, "max_tokens": type(None),
    "min_tokens": int, "grows": bool, "chat_template": bool, "scoring": str, "decay": type(None),
    "kv_bits": type(None), "layer_budgets": type(None), "measured": type(None),
    "max_new_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float,
    "repetition_penalty": float, "stop": list, "seed": int, "dtype": str, "device": str,
    "prompt_tokens": int,
}  # fmt: skip


@pytest.fixture
def generate(h2okv_command, model_folder, prompt):
    def call(*args, model=model_folder, text=prompt):
        words = [text] if text is not None else []
        if "--max-new-tokens" not in args:
            words = ["--max-new-tokens", 24, *words]
        return h2okv_command("generate", "--model", model, *args, *words)

    return call


@pytest.fixture
def by_transformers(model_folder, prompt):
    """Return a function that continues a text by ``generate`` on a cache with the options."""

    def call(count, text=prompt, options=None, **settings):
        model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="h2o").eval()
        ids = AutoTokenizer.from_pretrained(model_folder)(text, return_tensors="pt").input_ids
        cache = h2okv.H2OCache(model.config, 16, 16, **options or {})
        settings |= {"max_new_tokens": count, "do_sample": False, "eos_token_id": 1}
        return model.generate(ids, past_key_values=cache, **settings)[0, ids.shape[1] :].tolist()

    return call


@pytest.fixture
def stdin(monkeypatch):
    def give(data: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


@pytest.mark.parametrize("chunk", ["", ",every=40"], ids=["default", "given"])
def test_rolling_positions_generate_past_the_context_window(
    generate, prompt, by_transformers, chunk
):
    text = prompt * 8  # the window is 256
    outcome = generate(
        *BUDGET, "--cache", f"positions=rolling{chunk}", "--max-new-tokens", 90, "--json",
        text=text,
    )  # fmt: skip
    assert outcome.code == 0
    record = json.loads(outcome.out)
    assert record["prompt_tokens"] > 256 and record["finish_reason"] == "length"
    since = (record["prompt_tokens"] + 89) % (40 if chunk else 64)
    assert record["num_cached_tokens"] == 32 + since
    options = {"positions": "rolling", "evict_every": 40 if chunk else 64}
    assert record["token_ids"] == by_transformers(90, text, options)


def test_compiled_steps_give_the_same_text(generate, monkeypatch):
    plain = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: plain(model, backend="eager", **options)
    )
    texts = [generate(*BUDGET, "--max-new-tokens", 20, *more).out for more in ((), ("--compile",))]
    assert texts[0] == texts[1] and texts[0].strip()


def test_a_fraction_is_of_the_whole_prompt_in_a_prompt_with_cuts(generate, prompt):
    options = ("--cache", "h2o:95%,every=7", "--max-new-tokens", 3, "--json")
    record = json.loads(generate(*options, text=prompt * 2 + "the cat sat" * 12).out)
    since = (record["prompt_tokens"] + 2) % 7
    assert record["num_cached_tokens"] == 2 * int(record["prompt_tokens"] * 0.475) + since
    assert (record["heavy"], record["recent"]) == (0.475, 0.475)


def test_text_goes_to_stdout_and_the_summary_to_stderr(generate):
    outcome = generate(*BUDGET, "--max-new-tokens", 20)
    assert outcome.code == 0
    assert outcome.out.strip()
    assert "tokens/s" not in outcome.out
    assert outcome.err.startswith("20 tokens (length) | first after ")
    assert outcome.err.endswith("tokens seen, 32 kept | h2o:32\n")


def test_summary_names_the_length_from_which_memory_is_saved(generate):
    """Compare with a full cache at the named length and one token before it."""
    few = ("--policy", "h2o", "--budget", 128, "--max-new-tokens")
    run = json.loads(generate(*few, 2, "--json", text="a cat").out)
    first = run["smaller_from"]
    assert 128 < first < 160 and run["kv_bytes"] >= run["kv_bytes_full"]
    outcome = generate(*few, 2, text="a cat")
    assert f"(nothing evicted yet; saves memory from {first} tokens on)" in outcome.err
    each = run["kv_bytes_full"] / run["num_seen_tokens"]
    # One token for each figure; the new one has not been through the cache.
    later = json.loads(generate(*few, 1, "--json", text="9" * first).out)
    assert later["num_seen_tokens"] == first
    assert each * (first - 1) <= later["kv_bytes"] < later["kv_bytes_full"]


def test_summary_shows_mean_and_maximum_of_budgets_by_head(generate, tmp_path):
    heads = tmp_path / "heads.json"
    heads.write_text("[[0.5, 1.5], [1.0, 1.0]]")
    outcome = generate("--budget", "64+16", "--cache", f"layers={heads}", text="a cat " * 60)
    pattern = r"(\d+) kept by a head on average, (\d+) by the largest"
    average, largest = map(int, re.search(pattern, outcome.err).groups())
    # 4 + 64 + 16 entries, or 4 + 96 + 16, and what was written since the prompt.
    assert 84 <= average < 84 + 64 and largest == average + 32
    assert re.search(r"\| best:64\+16,layers=by-head-[0-9a-f]{8}\n", outcome.err)


def test_json_is_one_object_with_these_fields(generate, prompt):
    options = ("--policy", "h2o", "--budget", "16+95%")
    outcome = generate(*options, "--json", "--max-new-tokens", 9, text=prompt * 2)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("\n") == 1
    result = json.loads(outcome.out)
    assert {name: type(value) for name, value in result.items()} == SETTINGS_FIELDS | RUN_FIELDS
    assert len(result["token_ids"]) == 9
    # The last token was made, but never went through the model.
    assert result["num_seen_tokens"] == result["prompt_tokens"] + 8


def test_a_budget_beyond_the_length_equals_transformers(generate, model_folder, prompt):
    result = json.loads(generate("--budget", "256+256", "--json", "--max-new-tokens", 30).out)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0]
    new_tokens = expected[inputs["input_ids"].shape[1] :].tolist()
    assert result["token_ids"] == new_tokens
    assert result["text"] == tokenizer.decode(new_tokens)


def test_compare_full_in_json(generate):
    result = json.loads(generate(*BUDGET, "--json", "--compare", "full").out)
    full = result["full"]
    fields = RUN_FIELDS | {"smaller_from": type(None)}  # than itself it never is
    assert {name: type(value) for name, value in full.items()} == fields
    assert full["kv_bytes"] == full["kv_bytes_full"] == result["kv_bytes_full"]
    assert full["num_cached_tokens"] == full["num_seen_tokens"] == result["num_seen_tokens"]
    assert result["num_cached_tokens"] == 32
    pairs = list(zip(result["token_ids"], full["token_ids"], strict=True))
    assert sum(a == b for a, b in pairs) <= result["same_next_token"] < len(pairs)


def test_compare_full_agrees_fully_if_nothing_is_evicted(generate):
    wide = ("--policy", "h2o", "--budget", "256+16")
    result = json.loads(generate(*wide, "--json", "--compare", "full").out)
    assert result["token_ids"] == result["full"]["token_ids"]
    assert result["same_next_token"] == len(result["token_ids"])


def test_compare_full_shows_both_texts_and_a_table(generate):
    outcome = generate(*BUDGET, "--compare", "full", "--max-new-tokens", 12)
    assert outcome.code == 0
    assert outcome.out.count(" ---\n") == 2
    for word in ("full cache", "h2o:32", "KV cache", "of 12"):
        assert word in outcome.out
    assert re.search(r" loaded in \d+\.\d s$", outcome.err, re.MULTILINE)


def test_compare_full_with_sampling_counts_no_choices(generate):
    result = json.loads(generate(*BUDGET, "--json", "--compare", "full", "--temperature", "1").out)
    assert result["same_next_token"] is None


def test_an_answer_is_read_again_with_the_full_cache(generate):
    outcome = generate(*BUDGET, "--max-new-tokens", 12, "--verify")
    line = re.search(r"^(\d+) of 12 next tokens are the full cache's", outcome.err, re.MULTILINE)
    verified = json.loads(generate(*BUDGET, "--json", "--max-new-tokens", 12, "--verify").out)
    figures = verified["verified"]
    assert (figures["tokens"], figures["agreed"]) == (12, int(line[1]))
    assert 0 < figures["agreed"] < 12 and figures["kl_divergence"] > 0
    wide = json.loads(generate("--policy", "full", "--json", "--verify").out)["verified"]
    assert wide["agreed"] == wide["tokens"] > 0 and wide["first_difference"] is None


def test_a_text_that_comes_at_once_has_no_speed(generate, monkeypatch):
    monkeypatch.setattr("h2okv.engine.verify._TIE", 1.0)
    monkeypatch.setattr("h2okv.engine.verify._NATS", float("inf"))
    repair = ("--max-new-tokens", 12, "--verify", "repair")
    for options in (repair, ("--max-new-tokens", 1)):
        outcome = generate(*BUDGET, *options)
        assert re.search(r"first after [0-9.]+ s \| KV cache ", outcome.err)
        assert "tokens/s" not in outcome.err and " - " not in outcome.err


def test_an_answer_that_differs_is_repaired(generate, monkeypatch):
    monkeypatch.setattr("h2okv.engine.verify._TIE", 1.0)
    monkeypatch.setattr("h2okv.engine.verify._NATS", float("inf"))
    outcome = generate(*BUDGET, "--json", "--max-new-tokens", 12, "--verify", "repair")
    repaired = json.loads(outcome.out)
    full = json.loads(generate("--policy", "full", "--json", "--max-new-tokens", 12).out)
    assert (repaired["token_ids"], repaired["text"]) == (full["token_ids"], full["text"])
    assert repaired["num_cached_tokens"] == repaired["num_seen_tokens"] == full["num_seen_tokens"]
    figures = repaired["verified"]
    assert figures["repaired"] and figures["repair_tokens"] == 13 and figures["agreed"] == 12


def test_sampling_repeats_with_its_seed(generate):
    hot = (*BUDGET, "--json", "--temperature", "1.5", "--top-p", "0.95")
    first, again, other = (
        json.loads(generate(*hot, "--seed", seed).out)["token_ids"] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("policy", ["full", "recent", "sink_recent", "h2o", "heavy", "random"])
def test_every_policy(generate, policy):
    budget = () if policy == "full" else BUDGET
    result = json.loads(generate(*budget, "--cache", "sink=2", "--policy", policy, "--json").out)
    assert result["policy"] == policy
    assert (result["num_cached_tokens"] == 34) is (policy != "full")


def test_policy_best_is_the_default_and_equals_its_options(generate):
    small = ("--budget", 32, "--max-new-tokens", 12, "--json")
    default = generate(*small).out
    named = generate(*small, "--policy", "best").out
    text = "h2o:27+5,scoring=expected,sink=4,layers=auto"
    others = (named, generate("--cache", text, *small[2:]).out)
    record, *records = [json.loads(out) for out in (default, *others)]
    assert record["policy"] == "h2o" and record["cache"] == "best-v5:32"
    factors = [factor for layer in record["layer_budgets"] for factor in layer]
    entries = [min(9 + 27 * factor, record["prompt_tokens"]) + 11 for factor in factors]
    assert record["mean_cached_tokens"] == pytest.approx(sum(entries) / len(entries), abs=1)
    for other in records:
        for name in ("cache", "heavy", "recent", "sink", "scoring", "layer_budgets", "token_ids"):
            assert record[name] == other[name], name
    even = json.loads(generate(*small, "--cache", "layers=even").out)
    assert even["layer_budgets"] is None and even["num_cached_tokens"] == 36 + 11
    assert even["cache"] == "best:32,layers=even"
    h2o = json.loads(generate(*small, "--policy", "h2o").out)
    assert h2o["cache"] == "h2o:32" and h2o["num_cached_tokens"] == 32


@pytest.mark.parametrize(("policy", "grows"), [("snapkv", True), ("h2o", False)])
def test_snapkv_has_a_note_on_bytes_beyond_the_budget(generate, policy, grows):
    err = generate("--budget", 32, "--policy", policy).err
    assert ("note: snapkv evicts once, after the prompt" in err) is grows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype(generate, dtype):
    result = json.loads(generate(*BUDGET, "--dtype", dtype, "--json").out)
    assert (result["dtype"], result["device"]) == (dtype, "cpu")


def test_prompt_from_a_file(generate, tmp_path, prompt):
    file = tmp_path / "prompt.txt"
    file.write_text(prompt + "\n", encoding="utf-8")
    from_file = generate(*BUDGET, "--file", file, text=None)
    assert from_file.out == generate(*BUDGET).out


@pytest.mark.parametrize("text", [None, "-"])
def test_prompt_from_stdin(generate, stdin, prompt, text):
    stdin(prompt.encode() + b"\n")
    assert generate(*BUDGET, text=text).out == generate(*BUDGET).out


def test_generation_ends_at_the_context_window(generate):
    result = json.loads(generate(*BUDGET, "--json", "--max-new-tokens", 10_000).out)
    assert result["finish_reason"] == "context"
    assert result["prompt_tokens"] + len(result["token_ids"]) == 256


def test_generation_ends_at_the_end_token(generate, save_model):
    free = json.loads(generate(*BUDGET, "--json").out)["token_ids"]
    model = save_model(eos=free[5])
    result = json.loads(generate(*BUDGET, "--json", model=model).out)
    assert result["finish_reason"] == "eos"
    assert result["token_ids"] == free[: free.index(free[5]) + 1]


def test_the_bundled_model_is_the_default(h2okv_command):
    args = ("generate", *BUDGET, "--max-new-tokens", 4, "--json")
    result = json.loads(h2okv_command(*args, "It was late when the old man").out)
    assert result["model"] == "bundled"
    assert len(result["token_ids"]) == 4
    # Stored in half precision, but computed in what every CPU is good at.
    assert result["dtype"] == "float32"
    args = (*args, "--dtype", "bfloat16")
    assert json.loads(h2okv_command(*args, "It was late").out)["dtype"] == "bfloat16"


def test_version(h2okv_command):
    assert h2okv_command("--version").out == f"h2okv {h2okv.__version__}\n"


def test_a_fraction_of_a_short_prompt_is_raised_with_a_note(generate):
    h2o = ("--policy", "h2o", "--max-new-tokens")
    outcome = generate(*h2o, 150, text="the cat sat on the mat")
    assert (
        "tokens is too few for good text, so 64 heavy + 64 recent entries are kept" in outcome.err
    )
    assert "to keep fewer, give a token count, such as --budget 32" in outcome.err
    assert ", 128 kept" in outcome.err
    assert "note" not in generate(*BUDGET).err
    few = ("--budget", "4+4")
    assert "note: only 8 tokens were kept" in generate(*h2o, 20, *few).err


def test_a_budget_has_two_parts_or_one(generate):
    record = json.loads(generate("--budget", "10+30", "--json").out)
    assert (record["heavy"], record["recent"]) == (10, 30)
    h2o = ("--policy", "h2o", "--budget", "12+3", "--cache", "sink=2")
    record = json.loads(generate(*h2o, "--json").out)
    assert record["num_cached_tokens"] == 17
    assert json.loads(generate("--budget", "full", "--json").out)["policy"] == "full"
    outcome = generate("--budget", "40,50")
    assert outcome.code == 2 and "several caches are chosen" in outcome.err


def test_a_chat_template_is_used_unless_the_text_is_raw(generate, chat_folder):
    options = (*BUDGET, "--json", "--max-new-tokens", 5)
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a cat?"}]
    for more, conversation in (((), messages[1:]), (("--system", "be brief"), messages)):
        record = json.loads(generate(*options, *more, model=chat_folder, text="a cat?").out)
        form = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
        assert record["chat_template"] and record["prompt_tokens"] == len(form)
    record = json.loads(generate(*options, "--raw", model=chat_folder, text="a cat?").out)
    assert not record["chat_template"]
    assert record["prompt_tokens"] == len(tokenizer("a cat?")["input_ids"])
    for raw, message in (((), "template; put"), (("--raw",), "template, and --raw leaves it out;")):
        outcome = generate("--system", "be brief", *raw)
        assert outcome.code == 2 and f"--system needs a chat {message}" in outcome.err


@pytest.mark.parametrize("by_head", [True, False])
def test_eval_layers_measures_what_best_does(h2okv_command, tmp_path, monkeypatch, by_head):
    """Without --text, the factors of the file are those that a cache measures by itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out, path = tmp_path / "layers.json", bundled_model_path()
    options = ("--model", path, "--dtype", "float32", "--out", out)
    outcome = h2okv_command("eval", "layers", *options, *["--by-head"] * by_head)
    assert outcome.code == 0 and "by 4864 tokens" in outcome.out
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = CacheConfig(budget=0.2, policy="best", positions="original" if by_head else "rolling")
    measured = h2okv.H2OCache.from_config(model, config).cache_config
    assert measured.is_best and measured.is_by_head == by_head
    assert json.loads(out.read_text()) == json.loads(json.dumps(measured.layer_budgets))


def test_layer_budgets_are_read_from_a_measured_file(
    generate, h2okv_command, model_folder, tmp_path
):
    text, out = tmp_path / "t.txt", tmp_path / "layers.json"
    text.write_text("a cat and a dog and a bird " * 40)
    outcome = h2okv_command("eval", "layers", "--model", model_folder, "--text", text, "--out", out)
    factors = json.loads(out.read_text())
    lost = ("--out", tmp_path / "nowhere" / "layers.json")
    refused = h2okv_command("eval", "layers", "--model", model_folder, "--text", text, *lost)
    assert refused.code == 2 and "nowhere" in refused.err and refused.err.count("\n") == 1
    assert outcome.code == 0 and len(factors) == 2 and abs(sum(factors) - 2) < 1e-3
    options = ("--budget", "20+4", "--cache", f"layers={out}")
    record = json.loads(generate(*options, "--json", "--max-new-tokens", 4).out)
    assert record["layer_budgets"] == factors
    heads = ("--text", text, "--out", out, "--by-head", "--budget")
    for budget in ("64", "100%", "0%"):
        refused = h2okv_command("eval", "layers", "--model", model_folder, *heads, budget)
        assert refused.code == 2 and "must be a fraction of the text below 1" in refused.err
    outcome = h2okv_command("eval", "layers", "--model", model_folder, *heads, "30%")
    factors = json.loads(out.read_text())
    assert "2 layers, 2 heads in each" in outcome.out and [len(layer) for layer in factors] == [
        2,
        2,
    ]
    record = json.loads(generate(*options, "--json", "--max-new-tokens", 4).out)
    assert record["layer_budgets"] == factors
    for content, message in (
        ("no", "must be auto, even or factors in JSON"),
        ("{}", "layer_budgets must be non-negative with mean 1"),
        ('["much"]', "must be auto, even or factors in JSON"),
        ("[1, 1, 1]", "has 3 factors"),
    ):
        out.write_text(content)
        outcome = generate(*options)
        assert outcome.code == 2 and message in outcome.err


def test_auto_layer_budgets_are_measured_once_and_stored(
    generate, h2okv_command, model_folder, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    measure = own_budgets.measure_shares

    def count(*args, **options):
        measured.append(options)
        return measure(*args, **options)

    monkeypatch.setattr(own_budgets, "measure_shares", count)
    few = ("--max-new-tokens", 4)
    best = ("--cache", "best:15%+5%,layers=auto", *few)

    def factors(*options):
        return json.loads(generate(*options, "--json").out)["layer_budgets"]

    first = factors(*best)
    path = next((tmp_path / "h2okv" / "layer-budgets").iterdir())
    stored = json.loads(path.read_text())
    assert [len(layer) for layer in first] == [2, 2]
    assert factors(*best) == first and len(measured) == 1
    path.write_text("[")  # by a machine that lost its power
    assert factors(*best) == first and len(measured) == 2
    for wrong in (
        [1, 1], [[1, 1, 1], [1, 1, 1]], [[1, 1]], [["1", 1], [1, True]], None, {"factors": 1},
    ):  # fmt: skip
        path.write_text(json.dumps(stored | {"by_head": [wrong] * len(stored["fractions"])}))
        assert factors(*best) == first and json.loads(path.read_text()) == stored
    for wrong in ("[" * 20_000, "[]", "null", json.dumps(stored | {"weights": {}})):
        path.write_text(wrong)
        assert factors(*best) == first and json.loads(path.read_text()) == stored
    assert len(measured) == 12
    # One measurement serves all dtypes, budgets, layers and heads.
    assert factors(*best, "--dtype", "bfloat16") == first
    factors("--cache", "best:40%,layers=auto", *few)
    rolled = factors("--cache", "best:15%+5%,positions=rolling", *few)
    assert isinstance(rolled[0], float)
    out = tmp_path / "heads.json"
    layers = ("eval", "layers", "--by-head", "--out", out, "--budget", f"{15 / 0.85}%")
    assert h2okv_command(*layers, "--model", model_folder).code == 0
    assert json.loads(out.read_text()) == first and len(measured) == 12

    assert factors("--cache", "recent,layers=auto", *few) is None and len(measured) == 12
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # nothing can be kept there
    assert factors(*best) == first and len(measured) == 13
    refused = generate("--cache", "best,sink=20,scoring=mean:0.5")
    assert refused.code == 2 and "decay=0.5 has no effect" in refused.err


def test_eval_layers_measures_for_later_uses(
    generate, h2okv_command, model_folder, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(own_budgets, "_REFUSED", set())
    monkeypatch.setattr(own_budgets, "_UNSAVED", [])
    monkeypatch.setattr(own_budgets, "expected_seconds", lambda model: 1e4)
    best = ("--policy", "best", "--max-new-tokens", 4, "--json")
    even = generate(*best)
    assert json.loads(even.out)["layer_budgets"] is None
    command = "h2okv eval layers --model"
    assert "would take about 2.8 h here" in even.err and command in even.err
    measured = h2okv_command("eval", "layers", "--model", model_folder, "--out", tmp_path / "x")
    assert measured.code == 0 and "(about 2.8 h here)\n" in measured.err
    by_head = json.loads(generate(*best).out)["layer_budgets"]
    assert [len(layer) for layer in by_head] == [2, 2]


def test_pinned_messages_are_not_evicted(generate, chat_folder, tmp_path):
    options = ("--policy", "h2o", "--budget", "12+4", "--json", "--max-new-tokens", 8)
    chat = {"model": chat_folder, "text": "a cat? " * 20}
    record = json.loads(generate(*options, "--system", "be brief", "--pin", "system", **chat).out)
    assert record["num_cached_tokens"] == 16
    for more, message in (
        (("--pin", "system"), "finds no system message"),
        (("--pin", "user"), "tokens are pinned and policy='h2o' keeps 12 heavy ones"),
        (("--pin", "user", "--raw"), "--pin needs a chat template"),
    ):
        outcome = generate(*options, *more, **chat)
        assert outcome.code == 2 and message in outcome.err
    heads = tmp_path / "heads.json"
    heads.write_text(json.dumps([[0.1, 1.9]] * 2))
    pinned = ("--budget", "40+4", "--cache", f"layers={heads}", "--system", "be brief")
    outcome = generate(*options[:2], *pinned, "--json", "--pin", "system", **chat)
    assert json.loads(outcome.out)["layer_budgets"] == [[0.55, 1.45]] * 2


STORED_MODES = {
    "several sequences": {"do_sample": False, "num_return_sequences": 3, "num_beams": 3},
    "samples": {"do_sample": True, "temperature": 1.0, "top_k": 1, "num_return_sequences": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "beams in groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": "low"},
    "early exit": {"assistant_early_exit": 1},
    "static cache": {"cache_implementation": "static", "max_length": 20},
    "no cache": {"use_cache": False, "token_healing": True},
    "guidance": {"guidance_scale": 1.5},
    "forced end": {"forced_eos_token_id": 5},
    "outputs": {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True},
}


@pytest.mark.parametrize("stored", STORED_MODES.values(), ids=STORED_MODES.keys())
def test_stored_generation_modes_do_not_change_the_text(generate, save_model, stored):
    model = save_model()
    (model / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, **stored}))
    options = (*BUDGET, "--max-new-tokens", 16, "--json")
    plain, record = (json.loads(generate(*options, **m).out) for m in ({}, {"model": model}))
    for name in ("token_ids", "kv_bytes", "kv_bytes_full", "num_seen_tokens"):
        assert record[name] == plain[name], name


def test_a_config_without_return_dict_does_not_change_the_text(generate, save_model):
    model, options = save_model(), (*BUDGET, "--max-new-tokens", 4, "--json")
    config = json.loads((model / "config.json").read_text())
    config |= {"return_dict": False, "output_hidden_states": True}
    (model / "config.json").write_text(json.dumps(config))
    texts = [json.loads(generate(*options, **m).out)["text"] for m in ({}, {"model": model})]
    assert texts[0] == texts[1]


def test_stored_stop_strings_end_the_text_unless_others_are_given(generate, save_model):
    model, options = save_model(), (*BUDGET, "--max-new-tokens", 24, "--json")
    free = json.loads(generate(*options).out)["text"]
    stops = {"bos_token_id": 0, "stop_strings": [free[4:7]]}
    (model / "generation_config.json").write_text(json.dumps(stops))
    record = json.loads(generate(*options, model=model).out)
    assert (record["text"], record["finish_reason"]) == (free[: free.index(free[4:7])], "stop")
    other = json.loads(generate(*options, "--stop", "no such text", model=model).out)
    assert (other["text"], other["finish_reason"]) == (free, "length")
    stopped = json.loads(generate(*options, "--stop", free[10:13]).out)
    assert (stopped["text"], stopped["finish_reason"]) == (free[: free.index(free[10:13])], "stop")


def test_generation_config_sets_the_sampling_defaults(generate, save_model):
    model = save_model()
    defaults = {"bos_token_id": 0, "do_sample": True, "temperature": 1.5, "top_k": 7}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    record = json.loads(generate(*BUDGET, "--json", model=model).out)
    assert (record["temperature"], record["top_k"], record["top_p"]) == (1.5, 7, 1.0)
    options = (*BUDGET, "--json", "--temperature", 1.5, "--top-k", 7)
    assert record["token_ids"] == json.loads(generate(*options).out)["token_ids"]
    greedy = json.loads(generate(*BUDGET, "--json", "--temperature", 0, model=model).out)
    assert greedy["token_ids"] == json.loads(generate(*BUDGET, "--json").out)["token_ids"]


def test_a_repetition_penalty_reaches_the_model(generate, by_transformers):
    record = json.loads(generate(*BUDGET, "--json", "--repetition-penalty", 1.7).out)
    assert record["token_ids"] == by_transformers(24, repetition_penalty=1.7)


def test_scoring_and_its_decay_reach_the_cache(generate, by_transformers):
    options = ("--cache", "scoring=decay:0.5", "--json", "--max-new-tokens", 30)
    record = json.loads(generate(*BUDGET, *options).out)
    assert (record["scoring"], record["decay"]) == ("decay", 0.5)
    assert record["token_ids"] == by_transformers(30, options={"scoring": "decay", "decay": 0.5})


def test_kv_bits_reach_the_cache(generate):
    options = ("--json", "--max-new-tokens", 5)
    full, packed = (
        json.loads(generate(*options, *more).out) for more in ((), ("--cache", "bits=4"))
    )
    assert packed["kv_bits"] == 4 and packed["kv_bytes"] < full["kv_bytes"] / 2
    outcome = generate("--cache", "bits=3")
    assert outcome.code == 2 and "kv_bits must be 8, 6 or 4, got 3" in outcome.err
