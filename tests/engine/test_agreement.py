"""The bound of agreement holds as often as it says, and the budget follows a goal; numbers only."""

import random
from collections import Counter

import pytest

from h2okv.engine.agreement import FACTORS, AgreementLog, BudgetLevels, joined, lower_bound

KINDS = {"text": (60, 0.97), "chat": (150, 0.985), "tools": (25, 0.995)}
"""Mean tokens of an answer, and the share that agrees."""


def answer(rng, mean, share, spread=40):
    """Return the tokens of a random answer, and how many agree: answers differ by themselves."""
    tokens = 1 + round(rng.gammavariate(2, mean / 2))
    of_answer = rng.betavariate(share * spread, (1 - share) * spread)
    return tokens, sum(rng.random() < of_answer for _ in range(tokens))


def truth(history, window):
    """Return the share of all tokens since the oldest of the newest answers read again."""
    read = [at for at, (_, _, _, is_read) in enumerate(history) if is_read]
    start = read[-window - 1] + 1 if len(read) > window else 0
    seen = history[start : read[-1] + 1]
    return sum(n * share for _, n, share, _ in seen) / sum(n for _, n, _, _ in seen)


def test_the_bound_holds_over_a_drift_of_three_kinds():
    """1,000 requests, a fifth of them read again; after half of them one kind agrees less."""
    counts = Counter()
    for seed in range(20):
        rng, log, history = random.Random(seed), AgreementLog(60), []
        for number in range(1000):
            kind = rng.choice([*KINDS])
            mean, share = KINDS[kind]
            share -= 0.05 * (kind == "text" and number >= 500)
            tokens, agreed = answer(rng, mean, share)
            history.append((kind, tokens, share, rng.random() < 0.2))
            log.write("512", kind, tokens)
            if history[-1][3]:
                log.add("512", kind, tokens, agreed)
            if number % 20 == 19 and number >= 100:
                for row in log.rows():
                    same = [entry for entry in history if entry[0] == row.kind]
                    counts[row.kind, row.bound <= truth(same, 60)] += 1
                counts["all", log.total().bound <= truth(history, 60)] += 1
    for kind in (*KINDS, "all"):
        assert counts[kind, True] / (counts[kind, True] + counts[kind, False]) >= 0.93, counts


def test_few_answers_prove_little():
    assert lower_bound([40], [40]) == 0
    assert lower_bound([40] * 3, [40] * 3) < 0.8 < lower_bound([40] * 20, [40] * 20) < 1
    # One answer of forty tokens that all differ is one observation.
    assert lower_bound([40] * 20, [40] * 19 + [0]) < lower_bound([40] * 20, [38] * 20)


def test_kinds_are_weighted_by_what_was_written():
    log = AgreementLog()
    for _ in range(30):
        log.write("512", "chat", 900)
        log.add("512", "chat", 100, 100)
        log.write("512", "tools", 100)
        log.add("512", "tools", 100, 50)
    total = log.total()
    assert total.agreement == pytest.approx(0.95) and total.bound < 0.95
    assert [(row.kind, row.agreement) for row in log.rows()] == [("chat", 1.0), ("tools", 0.5)]
    assert joined([(log.rows()[0], 5)]).bound == pytest.approx(log.rows()[0].bound)


def test_what_is_old_leaves_the_total():
    log = AgreementLog(10)
    for budget, agreed in (("256", 40), ("512", 20)):
        for _ in range(10):
            log.add(budget, "chat", 40, agreed)
    assert log.total().agreement == 0.5
    assert {row.budget: row.agreement for row in log.rows()} == {"256": 1.0, "512": 0.5}


CURVE = dict(zip(FACTORS, (0.99, 0.985, 0.975, 0.96, 0.93, 0.90, 0.85), strict=True))


def follow(rng, levels, count, loss, share=0.2):
    """Serve requests, of which a share is read again; return the true agreement of each."""
    truths = []
    for _ in range(count):
        level = levels.level("text")
        truths.append(list(CURVE.values())[level] - loss)
        if rng.random() < share:
            levels.add("text", level, *answer(rng, 60, truths[-1]))
    return truths


def test_the_budget_goes_down_to_what_the_goal_allows_and_up_after_a_drift():
    late, after, later = [], [], []
    for seed in range(20):
        rng, levels = random.Random(seed), BudgetLevels(0.95)
        truths = follow(rng, levels, 2000, 0.0)
        late += truths[1000:]
        assert levels.level("text") >= 1 and not levels.missed
        follow(rng, levels, 200, 0.02)  # the texts become harder
        after.append(sum(follow(rng, levels, 200, 0.02)) / 200)
        later += follow(rng, levels, 1000, 0.02)
    mean = [sum(numbers) / len(numbers) for numbers in (late, after, later)]
    assert min(mean) >= 0.95, mean


def test_a_budget_that_cannot_hold_the_goal_is_an_alarm():
    rng, levels = random.Random(0), BudgetLevels(0.95)
    follow(rng, levels, 200, 0.10)
    assert levels.missed == {"text"} and levels.level("text") == 0
    follow(rng, levels, 1500, -0.005)
    assert not levels.missed
