"""What users run, on a GPU: the same tokens and kept entries as on the CPU, for every option.

The CPU's own results are held to formulas in loops elsewhere. Without a GPU everything is skipped.
"""

import json
import os
import warnings

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
)

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cache.argument import CACHE
from h2okv.cache.base_layer import BaseLayer
from h2okv.cli.app import run
from h2okv.integration import prompt_chunks
from h2okv.integration.graphs import VARIABLE
from h2okv.ops import dispatch
from h2okv.ops.choice import CutRules, choose, protected_entries
from h2okv.ops.compaction import pick

Rows = pytest.importorskip("h2okv.ops.triton_cut").Rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
NEW = 24
OPTIONS = {
    "h2o": {}, "whole": {"heavy": 200, "recent": 200}, "recent": {"policy": "recent"},
    "sinks kept": {"policy": "sink_recent", "sink": 4}, "snapkv": {"policy": "snapkv"},
    "best": {"policy": "best", "layer_budgets": None}, "mean": {"scoring": "mean"},
    "decay": {"scoring": "decay"}, "value norm": {"scoring": "value_norm"},
    "rolling": {"positions": "rolling"}, "8 bits": {"kv_bits": 8}, "6 bits": {"kv_bits": 6},
    "4 bits": {"kv_bits": 4}, "in chunks": {"evict_every": 16},
    "at fixed places": {"evict_every": 16}, "by layer": {"layer_budgets": [0.8, 1.2]},
    "by head": {"layer_budgets": [[0.6, 1.2], [1.5, 0.7]]},
}  # fmt: skip
BEST_BY_HEAD = {"scoring": "expected", "sink": 4} | OPTIONS["by head"]
OPTIONS |= {
    "best by head": BEST_BY_HEAD | {"evict_every": 1},
    "best by head, spans": BEST_BY_HEAD | {"evict_every": 16},
    "best by head, whole prompts": BEST_BY_HEAD | {"evict_every": "prompt+8"},
}


@pytest.fixture(autouse=True)
def _as_users_run(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "auto")


def prompts(batch=2, length=70):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :9] = 0
    return ids, mask


def continued(model, device, batch=2, **options):
    """Return the new tokens of ``generate`` and what each layer keeps."""
    model = model.to(device)
    ids, mask = prompts(batch)
    generation = {"max_new_tokens": NEW, "do_sample": False} | options.pop("generation", {})
    cache = h2okv.H2OCache(
        model.config, **({"heavy": 0.15, "recent": 0.15, "min_tokens": 0} | options)
    )
    with h2okv.enable(model):
        tokens = model.generate(
            ids.to(device), attention_mask=mask.to(device), past_key_values=cache, **generation
        )
    cache.check_integrity()
    full = [index for index, layer in enumerate(cache.layers) if isinstance(layer, BaseLayer)]
    heads = [head for layer in full for row in cache.kept_positions(layer).tolist() for head in row]
    return tokens.cpu(), [{position for position in head if position >= 0} for head in heads]


def same(actual, expected):
    assert torch.equal(actual[0], expected[0])
    assert actual[1] == expected[1]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("ops", ["auto", "plain"])
def test_generate_equals_the_cpu(make_llama, name, ops):
    model = make_llama().float()
    expected = continued(model, "cpu", **OPTIONS[name])
    with dispatch.use(ops):
        same(continued(model, "cuda", **OPTIONS[name]), expected)


def test_the_kernels_are_used(make_llama):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (64, 96, 128, 256):
            for is_by_head in (False, True):
                device = torch.device("cuda", 0)
                chosen = dispatch.operations(device, dtype, size, size, 4, is_by_head=is_by_head)
                assert chosen.name == "triton", chosen.why


@pytest.mark.parametrize("generation", [{"num_beams": 3}, {"do_sample": False}], ids=["beams", "1"])
def test_ways_to_generate(make_llama, generation):
    model = make_llama().float()
    options = {"generation": generation}
    expected = continued(model, "cpu", **options)
    same(continued(model, "cuda", **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [300, 5000])
def test_a_cut_by_kernels_is_that_of_pytorch(dtype, entries):
    """The same entries stay, to the last bit, with many ties; new slots are in the same order."""
    device, heads, budget = torch.device("cuda", 0), 4, entries // 3
    kernels = dispatch.operations(device, dtype, 128, 128, 1).cut
    assert kernels is not None
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randint(-3, 9, (2, heads, entries), generator=generator, device=device) / 2.0
    scores[:, 1] = 0.0
    scores[:, 2, ::7] = torch.inf
    positions = torch.rand(scores.shape, generator=generator, device=device).argsort(dim=-1)
    positions = positions.to(torch.int32).masked_fill(scores == 1.5, -1)
    keys, values = (
        torch.randn(*scores.shape, 128, generator=generator, device=device).to(dtype)
        for _ in range(2)
    )
    seen = torch.full((2,), entries, device=device)
    sink, recent, total = (
        torch.full((2, 1, 1), number, device=device) for number in (2, budget // 4, budget)
    )
    protected = protected_entries(positions, seen.view(-1, 1, 1) - 1, sink, recent)
    indices, is_kept = choose(scores, positions, protected, total, budget)
    assert is_kept.all()
    source = Rows(keys, values, scores, positions)
    free = torch.zeros(2, heads, 1, dtype=torch.int64, device=device)
    rules = CutRules(seen, sink, recent, total)
    for in_place in (False, True):
        chosen = kernels.select(scores, None, scores, positions, rules, budget, in_place)
        target = Rows(*(tensor[:, :, : budget + 9].clone() for tensor in source[:4]))
        if in_place:
            target = source
        expected = [keys.gather(2, indices.unsqueeze(-1).expand(-1, -1, -1, 128)),
                    positions.gather(-1, indices)]  # fmt: skip
        kernels.move(source, target, heads, chosen, free=free)
        order = target.positions[..., :budget].argsort(dim=-1)
        expected_order = expected[1].argsort(dim=-1)
        if not in_place:
            assert torch.equal(target.positions[..., :budget], expected[1])
            assert torch.equal(target.keys[:, :, :budget], expected[0])
        for actual, reference in ((target.positions, expected[1]), (target.keys, expected[0])):
            picked = pick(actual[:, :, :budget], order), pick(reference, expected_order)
            assert torch.equal(*picked)
        assert (target.positions[..., budget:] == -1).all()
        assert (free == budget).all()


def test_sliding_layers_and_learned_sinks():
    common = dict(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    models = [
        Gemma3ForCausalLM(Gemma3TextConfig(**common)),
        GptOssForCausalLM(GptOssConfig(**common, **experts)),
    ]
    for model in models:
        model = model.eval().float()
        expected = continued(model, "cpu", batch=1)
        same(continued(model, "cuda", batch=1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["h2o", "best", "by head", "best by head, spans", "rolling", "8 bits", "4 bits"]
)
def test_half_precision(make_llama, dtype, name):
    """Logits of forced tokens are near those of the CPU in fp32, with a budget above the text."""
    model = make_llama(sharpness=2.0)
    ids, _ = prompts(1, 90)
    logits = {}
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        model = model.to(device, kind)
        options = {"heavy": 60, "recent": 60} | OPTIONS[name]
        cache = h2okv.H2OCache(model.config, **options)
        with h2okv.enable(model), torch.no_grad():
            model(ids[:, :60].to(device), past_key_values=cache)
            steps = [
                model(ids[:, at : at + 1].to(device), past_key_values=cache).logits
                for at in range(60, 90)
            ]
        logits[device] = torch.cat(steps).float().cpu()
    error = (logits["cuda"] - logits["cpu"]).norm() / logits["cpu"].norm()
    assert error < (0.03 if "bits" not in name else 0.15), error


@pytest.mark.parametrize("options", [{}, {"policy": "best", "layer_budgets": None}], ids=str)
def test_compiled_steps_equal_eager_ones(make_llama, options):
    model = make_llama().float()
    eager = continued(model, "cuda", **options)
    with h2okv.enable(model, compile=True):
        same(continued(model, "cuda", **options), eager)


@pytest.fixture
def replays(monkeypatch):
    """Graphs that are replayed, as a list that grows."""
    graphs, plain = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (graphs.append(graph), plain(graph))
    )
    return graphs


REPLAYED = {"h2o", "best", "in chunks", "rolling", "decay", "8 bits", "by layer", "by head"}
REPLAYED |= {"best by head", "best by head, whole prompts"}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", sorted(REPLAYED))
def test_replayed_steps_equal_eager_ones(make_llama, monkeypatch, replays, name, batch):
    """As `tests/integration/test_graphs.py` on the pretended device."""
    model = make_llama().float()
    monkeypatch.setenv(VARIABLE, "off")
    expected = continued(model, "cuda", batch, **OPTIONS[name])
    assert not replays
    monkeypatch.setenv(VARIABLE, "auto")
    for _ in range(2):  # the second cache may get the addresses of the first
        same(continued(model, "cuda", batch, **OPTIONS[name]), expected)
    assert len(replays) > NEW


CUTS = {
    "h2o": {"evict_every": 3}, "best by head": BEST_BY_HEAD | {"evict_every": 3},
    "best by head, whole prompts": BEST_BY_HEAD | {"evict_every": "prompt+3"},
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", sorted(CUTS))
def test_replayed_cuts_equal_eager_ones(make_llama, monkeypatch, replays, name, batch):
    """Texts and entries where cuts are replayed too."""
    model = make_llama().float()
    monkeypatch.setenv(VARIABLE, "off")
    expected = continued(model, "cuda", batch, **CUTS[name])
    monkeypatch.setenv(VARIABLE, "auto")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graph")
        same(continued(model, "cuda", batch, **CUTS[name]), expected)
    # A step after each but the first tokens, and a cut after each third but the first three.
    assert len(replays) >= NEW - 5 + NEW // 3 - 4


@pytest.mark.parametrize("name", sorted(set(CUTS) - {"best by head, whole prompts"}))
def test_replayed_chunks_of_prompts_equal_eager_ones(make_llama, monkeypatch, replays, name):
    monkeypatch.setattr(prompt_chunks, "CHUNK", 6)
    model, ids = make_llama().float().to("cuda"), torch.arange(160, device="cuda")[None] % 90 + 3
    results = []
    for setting in ("off", "auto", "auto"):
        monkeypatch.setenv(VARIABLE, setting)
        with h2okv.enable(model), torch.no_grad():
            cache = h2okv.H2OCache(model.config, **{"heavy": 8, "recent": 6} | CUTS[name])
            options = {"logits_to_keep": 1, CACHE: cache}
            logits = [model(ids[:, start : start + 80], **options).logits for start in (0, 80)]
            layers = range(len(cache.layers))
            positions = [cache.kept_positions(layer).sort().values for layer in layers]
        results.append((*logits, *positions))
    assert len(replays) > 10
    for result in results[1:]:
        for tensor, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(tensor, expected)


def test_sampling_goes_on_behind_graphs_and_where_there_is_none(make_llama, monkeypatch, replays):
    """A recording changes no random number, and a step that waits is noticed before one fails."""
    model, texts = make_llama().float(), []
    norm = type(model.model.norm)
    plain, sampled = norm.forward, {"do_sample": True}
    for setting, waits in (("off", False), ("auto", False), ("auto", True)):
        monkeypatch.setenv(VARIABLE, setting)
        if waits:
            monkeypatch.setattr(norm, "forward", lambda s, x: plain(s, x + 0 * x.max().item()))
        replays.clear()
        torch.manual_seed(7)
        if waits:
            with pytest.warns(UserWarning, match="waits for the device"):
                texts.append(continued(model, "cuda", 1, generation=sampled)[0])
        else:
            texts.append(continued(model, "cuda", 1, generation=sampled)[0])
        assert bool(replays) == (setting == "auto" and not waits)
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_turns_and_requests_are_replayed(make_llama, replays):
    model = make_llama().float().to("cuda")
    cache, (ids, _) = h2okv.H2OCache(model.config, heavy=12, recent=12), prompts(1)
    inputs = {"input_ids": ids.to("cuda")}
    with h2okv.enable(model):
        for turn in range(1, 3):
            model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
            assert len(replays) >= turn * (NEW - 6)
            inputs = cache.next_turn(ids[:, :9].to("cuda"))
    cache.check_integrity()


def test_steps_compile_without_a_break(capsys):
    args = ["bench", "--model", "bundled", "--contexts", "64", "--batches", "1", "--rounds", "1",
            "--runners", "dynamic,static,h2o", "--compile", "--no-peak"]  # fmt: skip
    assert run(args) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": "best", "layer_budgets": None}, {"layer_budgets": [[0.6, 1.2], [1.5, 0.7]]},
     {"kv_bits": 8}, {"evict_every": 16}, {"positions": "rolling"}],
    ids=str,
)  # fmt: skip
def test_the_engine_equals_generate(make_llama, options):
    model = make_llama().float()
    generator = torch.Generator().manual_seed(1)
    lengths = (60, 9, 33, 71, 18, 45, 27, 52)
    requests = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]
    params = h2okv.SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    # Five and six of them run in one graph.
    settings = {"max_num_seqs": 6, "heavy": 0.2, "recent": 0.2, "min_tokens": 0} | options
    outputs = {}
    for device in ("cpu", "cuda"):
        with h2okv.LLM(model.to(device), tokenizer, **settings) as llm:
            results = llm.generate(requests, params, show_progress=False)
            outputs[device] = [result.completions[0].token_ids for result in results]
    assert outputs["cuda"] == outputs["cpu"]


def test_a_saved_state_is_read_on_another_device(make_llama, tmp_path):
    model = make_llama().float()
    ids, _ = prompts(1)
    kept_positions = {}
    for device in ("cuda", "cpu"):
        model = model.to(device)
        cache = h2okv.H2OCache(model.config, heavy=0.2, recent=0.2, min_tokens=0)
        with h2okv.enable(model), torch.no_grad():
            if device == "cuda":
                model(ids.to(device), past_key_values=cache)
                cache.save(tmp_path / "state")
            cache = h2okv.H2OCache.load(tmp_path / "state", model)
            model(ids[:, :1].to(device), past_key_values=cache)
        kept_positions[device] = [
            cache.kept_positions(layer).cpu() for layer in range(len(cache.layers))
        ]
    assert all(map(torch.equal, kept_positions["cuda"], kept_positions["cpu"]))


@pytest.mark.parametrize(
    "placement",
    [("--weights", "device"), ("--weights", "cpu"), ("--weights", "device=50,disk=50")],
    ids=str,
)
def test_batch_with_weights_elsewhere(tmp_path, placement, monkeypatch):
    pytest.importorskip("greenlet")
    lines = [{"id": n, "prompt": "the cat sat on the mat and " * (n + 1)} for n in range(5)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = {}
    for device, options in (("cpu", ()), ("cuda", placement)):
        path = tmp_path / f"{device}.jsonl"
        monkeypatch.setenv("H2OKV_DEVICE", device)
        args = ["batch", "--model", "bundled", "--input", tmp_path / "in.jsonl", "--output", path,
                "--max-new-tokens", 8, "--policy", "h2o",
                "--dtype", "float32", *options]  # fmt: skip
        assert run([str(arg) for arg in args]) == 0
        records = map(json.loads, path.read_text().splitlines())
        texts[device] = {record["id"]: record["text"] for record in records}
    assert texts["cuda"] == texts["cpu"]


@pytest.mark.parametrize(
    "args",
    [("generate", "The sun rose over", "--max-new-tokens", "16"),
     ("generate", "The sun rose over", "--max-new-tokens", "16", "--policy", "h2o"),
     ("plan", "bundled"),
     ("eval", "fidelity", "--texts", "2", "--prompt-tokens", "128", "--new-tokens", "8"),
     ("env",)],
    ids=" ".join,
)  # fmt: skip
def test_commands(args, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path))
    model = () if args[0] in ("plan", "env") else ("--model", "bundled")
    assert run([*args, *model]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
