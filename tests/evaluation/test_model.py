import pytest

from h2okv.config import CacheConfig
from h2okv.evaluation.model import ModelUnderTest, make_cache, settled


def budget(amount, **options):
    return CacheConfig.from_budget(amount, **options)


@pytest.mark.parametrize("config", [CacheConfig("full"), budget(1.0), budget(None, policy="h2o")])
def test_a_budget_of_everything_is_the_full_cache(config, subject):
    assert config.label == "full"
    assert not make_cache(config, subject.config).policy.evicts


def test_full_caches_have_one_identity_whatever_else_is_said(subject):
    plain = CacheConfig("full")
    other = budget(1.0, heavy_fraction=0.3, policy="recent", sink=4, positions="rolling")
    assert plain.identity() == other.identity()
    assert settled(other, subject.config) == plain


def test_what_is_not_default_stands_in_the_label():
    config = budget(0.2, heavy_fraction=0.25, sink=4, scoring="mean")
    assert config.label == "h2o, heavy 25%, sink 4, mean, 20%"
    assert budget(65).label == "h2o, 65"  # a token more or less is not another division


def test_top_k_is_masked_because_it_cannot_drop(subject):
    assert make_cache(budget(0.2, policy="topk"), subject.config).simulate
    assert not make_cache(budget(0.2), subject.config).simulate


def test_rolling_positions_are_read_in_blocks(subject):
    rolling = budget(64, positions="rolling")
    assert settled(rolling, subject.config).prefill_chunk == 512
    assert settled(budget(64), subject.config).prefill_chunk is None
    given = budget(64, positions="rolling", prefill_chunk=100)
    assert settled(given, subject.config).prefill_chunk == 100


def test_a_seed_reaches_the_cache(subject):
    config = CacheConfig("random", 4, 4)
    assert make_cache(config, subject.config, 7).policy.seed == 7


def test_weights_are_loaded_when_they_are_needed(subject):
    loads = []

    def load():
        loads.append(1)
        return subject.model

    model = ModelUnderTest(load, subject.config, subject.tokenizer, "x", 2048)
    assert model.decode(model.encode("It was late.")) == "It was late."
    assert model.too_long(CacheConfig("full"), 10) is None and not loads
    assert model.identity()["revision"].startswith("weights-")
    assert model.model is subject.model and loads == [1]


def test_longer_than_the_window_needs_rolling_or_chunks(subject):
    assert subject.too_long(budget(64), 2048) is None
    assert subject.too_long(budget(64), 2049).endswith(
        "; add --positions rolling or --prefill-chunk 512"
    )
    assert "cache of fixed size" in subject.too_long(CacheConfig("full"), 2049)
    assert subject.too_long(budget(64, positions="rolling"), 10**6) is None
    assert subject.too_long(budget(64, prefill_chunk=64), 10**6) is None


def test_a_rolling_budget_must_leave_room_for_a_block(subject):
    config = budget(0.5, positions="rolling")
    assert subject.too_long(config, 2048) is None
    assert "smaller budget" in subject.too_long(config, 4000)
