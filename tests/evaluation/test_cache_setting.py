import pytest

from h2okv.evaluation.cache_setting import CacheSetting


def test_the_whole_budget_is_divided(subject):
    tokens = CacheSetting("h2o", 65).options(subject.config)
    assert (tokens["heavy"], tokens["recent"]) == (32, 33)
    share = CacheSetting("h2o", 0.2, heavy_share=0.25).options(subject.config)
    assert (share["heavy"], share["recent"]) == pytest.approx((0.05, 0.15))


@pytest.mark.parametrize(
    "setting", [CacheSetting(), CacheSetting("h2o", 1.0), CacheSetting("full")]
)
def test_a_budget_of_everything_is_the_full_cache(setting, subject):
    assert setting.label == "full"
    assert not setting.make(subject.config, 0).policy.evicts


def test_full_caches_have_one_identity_whatever_else_is_said():
    plain, other = CacheSetting(), CacheSetting("recent", 1.0, 0.3, 4, "rolling")
    assert plain.identity() == other.identity()


def test_what_is_not_default_stands_in_the_label():
    setting = CacheSetting("h2o", 0.2, heavy_share=0.25, sink=4, more={"scoring": "mean"})
    assert setting.label == "h2o, heavy 25%, sink 4, scoring mean, 20%"


def test_top_k_is_masked_because_it_cannot_drop(subject):
    assert CacheSetting("topk", 0.2).options(subject.config)["simulate"] is True


def test_an_option_of_a_later_version_is_named(subject):
    setting = CacheSetting("h2o", 0.2, more={"entropy": 4})
    assert setting.missing() == ["entropy"]
    with pytest.raises(ValueError, match="no entropy for its cache"):
        setting.make(subject.config, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1.5}, "budget 1.5 is out of range"),
        ({"budget": 1}, "budget 1 is too small"),
        ({"budget": 64, "heavy_share": 2.0}, "heavy_share=2 is no share"),
        ({"positions": "round"}, "'round' is unknown"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CacheSetting(**options)


def too_long(setting, subject, tokens):
    return setting.too_long(subject.config, subject.window, tokens)


def test_longer_than_the_window_needs_rolling_or_chunks(subject):
    assert too_long(CacheSetting("h2o", 64), subject, 2048) is None
    assert "--positions rolling or --prefill-chunk" in too_long(
        CacheSetting("h2o", 64), subject, 2049
    )
    assert "cache of fixed size" in too_long(CacheSetting(), subject, 2049)
    assert too_long(CacheSetting("h2o", 64, positions="rolling"), subject, 10**6) is None
    assert too_long(CacheSetting("h2o", 64, prefill_chunk=64), subject, 10**6) is None


def test_a_rolling_budget_must_leave_room_for_a_block(subject):
    setting = CacheSetting("h2o", 0.5, positions="rolling")
    assert too_long(setting, subject, 2048) is None
    assert "smaller budget" in too_long(setting, subject, 4000)
