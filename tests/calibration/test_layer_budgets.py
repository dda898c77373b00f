"""`policy="best"` measures a model once, keeps the factors, and is even where it cannot."""

import json
import re
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import h2okv
from h2okv.assets import bundled_model_path, calibration_texts, sample_prompt
from h2okv.budget import flat_factors
from h2okv.calibration import factors, layer_budgets
from h2okv.calibration.factors import measure_layer_budgets
from h2okv.config import BEST_VERSION, FACTORS_VERSION
from h2okv.models import loading

BEST = {"policy": "best", "heavy": 0.17, "recent": 0.03}
SHARES = {}  # that an earlier test measured of the same model, text and options


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(bundled_model_path()).eval()


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Count the measurements; nothing is known of earlier ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("_UNSAVED", "_REFUSED"):
        monkeypatch.setattr(layer_budgets, name, type(getattr(layer_budgets, name))())
    monkeypatch.setattr(layer_budgets, "_LINE_SECONDS", 1e9)
    calls, measure, losses = [], layer_budgets.measure_shares, factors.losses_by_orders

    def count(model, ids, report):
        calls.append(ids.shape[1])
        size = sum(
            float(weight.detach().abs().sum(dtype=torch.float64)) for weight in model.parameters()
        )
        window = model.config.max_position_embeddings
        key = (size, model.dtype, window, ids.shape, layer_budgets._LINE_SECONDS)
        if key not in SHARES or factors.losses_by_orders is not losses:
            SHARES[key] = measure(model, ids, report=report)
        else:
            report(0.2), report(1.0)
        return SHARES[key]

    monkeypatch.setattr(layer_budgets, "measure_shares", count)
    return calls


def files(tmp_path):
    return sorted((tmp_path / "h2okv" / "layer-budgets").glob("*"))


def test_a_cache_of_a_model_is_measured_once_and_kept(model, measured, tmp_path, capsys):
    config = h2okv.H2OCache(model, **BEST).cache_config
    (path,) = files(tmp_path)
    assert config.label == "best-v5:20%" and measured == [4 * 1216]
    begun, done = capsys.readouterr().err.splitlines()
    assert re.search(
        "once for this model .about [0-9]+ (s|min) here.; --policy h2o or --cache layers", begun
    )
    assert done.endswith(f"; stored in '{path}'")
    tokenizer = layer_budgets.describe(model.config._name_or_path).tokenizer
    ids = [token for text in calibration_texts() for token in tokenizer(text).input_ids[:1216]]
    expected = measure_layer_budgets(model, torch.tensor([ids]), 0.17, by_head=True)
    assert config.layer_budgets == expected
    assert h2okv.H2OCache(model, **BEST).cache_config == config
    wrapped = torch.compile(model, backend="eager")
    assert h2okv.H2OCache.from_config(wrapped, h2okv.CacheConfig(**BEST)).cache_config == config
    assert measured == [4 * 1216] and capsys.readouterr().err == ""
    # Other weights are measured again, even where no sign has changed.
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    changed = h2okv.H2OCache(model, **BEST).cache_config
    assert len(measured) == 2 and changed.layer_budgets != expected
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    "first",
    # The processor multiplies no fp16.
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
def test_one_measurement_serves_dtypes_budgets_layers_and_heads(measured, capsys, first):
    dtypes = [first, torch.float32, torch.bfloat16, torch.float16]
    for dtype in dtypes:
        model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=dtype).eval()
        for heavy, recent in ((0.17, 0.03), (0.1, 0.1), (0.425, 0.075), (0.02, 0.01), (0.9, 0.1)):
            for positions in ("original", "rolling"):
                options = {"positions": positions, "heavy": heavy, "recent": recent}
                config = h2okv.H2OCache(model, policy="best", **options).cache_config
                assert config.is_by_head is (positions == "original") and config.measured == 5
        in_tokens = h2okv.H2OCache(model, policy="best", heavy=109, recent=19).cache_config
        assert in_tokens.layer_budgets == h2okv.H2OCache(model, **BEST).cache_config.layer_budgets
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("best")]
    assert len(measured) == 1 and len(lines) == 2


def test_shares_of_one_pass_are_those_of_each_fraction(model, monkeypatch):
    monkeypatch.setattr(factors, "_DRAWS", 1)  # which take half of the time
    ids = layer_budgets.calibration_ids(*_text(model)[::2])
    shares = factors.measure_shares(model, ids)
    for by_head in (False, True):
        for fraction in (0.17, 0.1):
            alone = measure_layer_budgets(model, ids, fraction, by_head=by_head)
            assert shares.factors(fraction, by_head) == alone
        between = flat_factors(measure_layer_budgets(model, ids, 0.2, by_head=by_head))
        interpolated = flat_factors(shares.factors(0.2, by_head))
        for factor, expected in zip(interpolated, between, strict=True):
            assert factor == pytest.approx(expected, abs=0.15)
        lowest, highest = shares.factors(0.001, by_head), shares.factors(1.0, by_head)
        measured = shares.by_head if by_head else shares.by_layer
        assert (lowest, highest) == (measured[0], measured[-1])


def test_the_expected_time_of_a_measurement_is_said_before_it(model, measured, monkeypatch, capsys):
    monkeypatch.setattr(layer_budgets, "expected_seconds", lambda model: 24.2)
    h2okv.H2OCache(model, **BEST)
    line = capsys.readouterr().err.splitlines()[0]
    assert "(about 24 s here); --policy h2o" in line


def test_what_takes_long_is_measured_on_request_only(
    model, measured, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(layer_budgets, "expected_seconds", lambda model: 1900.0)
    for _ in range(2):
        assert h2okv.H2OCache(model, **BEST).cache_config.layer_budgets is None
    (note,) = capsys.readouterr().err.splitlines()
    assert "would take about 32 min here; to measure it once" in note and measured == []
    assert note.endswith(f"h2okv eval layers --model {bundled_model_path()}")
    described = layer_budgets.describe(str(bundled_model_path()))
    shares = layer_budgets.measure_model(model, described)
    config = h2okv.H2OCache(model, **BEST).cache_config
    assert config.layer_budgets == shares.factors(0.17, by_head=True)
    assert layer_budgets.measure_model(model, described) == shares and len(measured) == 1


def test_messages_name_a_converted_file_without_its_digest(model, measured, tmp_path, capsys):
    folder = tmp_path / "a-model.Q4_1-0123456789abcdef"
    folder.symlink_to(bundled_model_path())
    model.config._name_or_path = str(folder)
    h2okv.H2OCache(model, **BEST)
    lines = capsys.readouterr().err.splitlines()
    assert all(re.search(r" a-model\.Q4_1( |:)", line) for line in lines), lines


def test_progress_is_written_without_a_terminal(model, measured, monkeypatch, capsys):
    monkeypatch.setattr(layer_budgets, "_LINE_SECONDS", 0.0)
    h2okv.H2OCache(model, **BEST)
    lines = capsys.readouterr().err.splitlines()[1:-1]
    percents = [int(re.search(": ([0-9]+) %, about .* left", line)[1]) for line in lines]
    assert percents == sorted(percents) and percents[0] < 20 and percents[-1] > 80
    assert len(percents) >= 4 * model.config.num_hidden_layers


def test_ctrl_c_while_measuring_leaves_nothing(model, measured, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(factors, "losses_by_orders", interrupt)
        with pytest.raises(KeyboardInterrupt):
            h2okv.H2OCache(model, **BEST)
    assert "stopped measuring" in capsys.readouterr().err and files(tmp_path) == []
    assert not any(module._forward_hooks for module in model.modules())
    assert h2okv.H2OCache(model, **BEST).cache_config.is_by_head and len(measured) == 2


def test_a_model_without_a_name_asks_no_hub(make_llama, measured, monkeypatch, capsys):
    def fail(*args, **options):
        raise AssertionError(args)

    for name in ("AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(getattr(loading, name), "from_pretrained", fail)
    model = make_llama()
    assert not model.config._name_or_path
    cache = h2okv.H2OCache(model, **BEST)
    assert cache.cache_config.layer_budgets is None and measured == []
    (note,) = capsys.readouterr().err.splitlines()
    assert "this llama model could not be measured (it has no name" in note
    with pytest.raises(ValueError, match="this llama model has no name.* LLM.model, tokenizer."):
        h2okv.LLM(model)


def _text(model):
    described = layer_budgets.describe(str(bundled_model_path()))
    return described.tokenizer, sample_prompt(), described.vocab_size


def test_rolling_positions_are_by_layer(model, measured):
    config = h2okv.H2OCache(model, positions="rolling", evict_every=64, **BEST).cache_config
    assert config.label == "best-v5:20%,positions=rolling,every=64" and measured == [4 * 1216]


@pytest.mark.parametrize("even", [None, "even"])
def test_even_budgets_are_not_measured(model, measured, even):
    cache = h2okv.H2OCache(model, layer_budgets=even, **BEST)
    assert cache.cache_config.layer_budgets is None
    assert h2okv.H2OCache(model).cache_config == h2okv.CacheConfig()
    assert measured == []


def test_a_config_alone_gives_even_budgets_with_one_warning(model, measured):
    with pytest.warns(UserWarning, match="H2OCache.model, ...., or layer_budgets of") as seen:
        cache = h2okv.H2OCache(model.config, **BEST)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert cache.cache_config.label == "best:20%,layers=even"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h2okv.H2OCache(model.config, layer_budgets=None, **BEST)
        h2okv.H2OCache(model.config, policy="full", layer_budgets="auto")
    assert measured == []


def _without_tokenizer(model):
    model.config._name_or_path = ""


def _with_a_short_context(model):
    model.config.max_position_embeddings = 6


def _on_the_disk(model):
    model.model.layers[1].to("meta")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_tokenizer, "could not be measured"),
        (_with_a_short_context, "could not be measured .a text of 6 tokens"),
        (_on_the_disk, "some of its weights are not in memory"),
    ],
)
def test_what_cannot_be_measured_is_even_with_one_sentence(
    model, measured, tmp_path, capsys, change, reason
):
    change(model)
    for _ in range(2):
        cache = h2okv.H2OCache(model, **BEST)
        assert cache.cache_config.layer_budgets is None
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "h2okv eval layers --by-head" in error
    assert error.startswith("note: every head gets the same budget, as ")
    assert re.search(reason, error)
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_costs_time_alone(model, measured, tmp_path, capsys):
    (tmp_path / "h2okv").write_text("a file, where a folder should be")
    first, again = (h2okv.H2OCache(model, **BEST).cache_config for _ in range(2))
    assert first == again and first.is_by_head and measured == [4 * 1216]
    error = capsys.readouterr().err
    assert error.count("\n") == 2 and "not stored" in error


def in_threads(*models):
    """Return the configs of a cache for each model, made in threads that begin together."""
    configs, begin = [], threading.Barrier(len(models))

    def make(model):
        begin.wait(60)
        configs.append(h2okv.H2OCache(model, **BEST).cache_config)

    threads = [threading.Thread(target=make, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return configs


def test_threads_with_one_model_measure_it_once(model, measured, capsys):
    configs = in_threads(*[model] * 4)
    assert len(configs) == 4 and all(config == configs[0] for config in configs)
    assert configs[0].is_by_head and measured == [4 * 1216]
    assert capsys.readouterr().err.count("\n") == 2


def test_two_that_measure_at_once_leave_one_whole_file(model, measured, tmp_path, monkeypatch):
    both, measure = threading.Barrier(2), layer_budgets.measure_shares

    def together(*args, **options):
        shares = measure(*args, **options)
        both.wait(60)
        return shares

    monkeypatch.setattr(layer_budgets, "measure_shares", together)
    other = AutoModelForCausalLM.from_pretrained(bundled_model_path()).eval()
    configs = in_threads(model, other)
    assert len(measured) == 2 and configs[0] == configs[1]
    (path,) = files(tmp_path)
    assert h2okv.H2OCache(model, **BEST).cache_config == configs[0] and len(measured) == 2
    assert json.loads(path.read_text())["by_head"]


def test_the_first_of_two_processes_stores_what_both_use(model, measured, monkeypatch, capsys):
    """One with other numbers, such as of another dtype, would generate other texts next time."""
    measure = layer_budgets.measure_shares

    def late(*args, **options):
        monkeypatch.setattr(layer_budgets, "measure_shares", measure)
        weights = layer_budgets.Weights.of(model)
        shares = measure(*args, **options)
        layer_budgets._store(model.config, weights, shares)
        even = tuple(tuple((1.0,) * len(layer) for layer in heads) for heads in shares.by_head)
        return replace(shares, by_head=even)

    monkeypatch.setattr(layer_budgets, "measure_shares", late)
    config = h2okv.H2OCache(model, **BEST).cache_config
    assert "another process" in capsys.readouterr().err
    assert config == h2okv.H2OCache(model, **BEST).cache_config and len(measured) == 1
    assert config.layer_budgets[0][0] != 1.0


@pytest.mark.parametrize("damage", ["", "[1, 1]", '{"setting": 1}', "{}", '{"version": 4}'])
def test_a_damaged_file_is_measured_again(model, measured, tmp_path, damage):
    config = h2okv.H2OCache(model, **BEST).cache_config
    (path,) = files(tmp_path)
    content = path.read_text()
    path.write_text(damage)
    assert h2okv.H2OCache(model, **BEST).cache_config == config == replace(config)
    assert path.read_text() == content and len(measured) == 2


def test_a_file_of_another_version_is_measured_again(model, measured, tmp_path, monkeypatch):
    h2okv.H2OCache(model, **BEST)
    monkeypatch.setattr(layer_budgets, "FACTORS_VERSION", FACTORS_VERSION + 1)
    assert h2okv.H2OCache(model, **BEST).cache_config.label == f"best-v{BEST_VERSION}:20%"
    assert len(measured) == 2 and len(files(tmp_path)) == 2


def test_a_model_without_gradients_is_measured_by_its_attention(model, monkeypatch, capsys):
    ids = torch.tensor([layer_budgets.encode(*_text(model))[:400]])
    both = measure_layer_budgets(model, ids, by_head=True)

    def fail(*args, **options):
        raise RuntimeError("no gradients here")

    monkeypatch.setattr(factors, "losses_by_orders", fail)
    by_attention = measure_layer_budgets(model, ids, by_head=True)
    assert "by their attention alone (no gradients here)" in capsys.readouterr().err
    for layer, other in zip(both, by_attention, strict=True):
        assert layer != other and len(layer) == len(other)
    flat = torch.tensor(both)
    assert flat.mean().item() == pytest.approx(1, abs=0.001) and flat.min() >= 0.09


@pytest.mark.parametrize(("load", "threads"), [(0.2, 3), (1.4, 2), (9.0, 1)])
def test_threads_are_those_of_free_cores(model, monkeypatch, load, threads):
    seen = []
    monkeypatch.setattr(factors.os, "getloadavg", lambda: (load, 0.0, 0.0))

    def count(*args, **options):
        seen.append(torch.get_num_threads())
        raise RuntimeError("seen")

    monkeypatch.setattr(factors, "losses_by_orders", count)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        measure_layer_budgets(model, torch.ones(1, 400, dtype=torch.long), by_head=True)
        assert seen == [threads] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
