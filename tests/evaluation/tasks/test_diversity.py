import pytest

from h2okv.config import CacheConfig
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.task import BatchOptions, TextPrompt
from h2okv.evaluation.tasks.diversity import Diversity

SAME = "the old man went down to the sea and looked at it for a long time"
OTHER = "every bright morning she walked through green fields without any hurry at all"


def make_task(copies=2, temperature=1.0):
    prompts = [TextPrompt(text, 12, (), text) for text in ("It was late when", "The sea was")]
    options = BatchOptions(batch_size=3, limit=2)
    return Diversity("talk", prompts, copies, options, SamplingParams(temperature=temperature))


def results(*texts):
    return {n: {"prompt": n // 2, "text": text} for n, text in enumerate(texts)}


def test_the_same_again_is_100_and_nothing_in_common_near_0():
    task = make_task()
    assert task.scores(results(SAME, SAME))["self_bleu"].value == pytest.approx(100)
    apart = task.scores(results(SAME, OTHER))["self_bleu"].value
    assert apart < 5
    both = task.scores(results(SAME, SAME, SAME, OTHER))["self_bleu"].value
    assert both == pytest.approx((100 + apart) / 2)


def test_each_prompt_is_answered_several_times(subject):
    task = make_task(copies=3)
    task.prepare(subject, [CacheConfig("full")])
    found = {}
    for batch in task.run(subject, CacheConfig.from_budget(8), task.samples(), 0):
        found |= batch
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert [found[n]["prompt"] for n in range(6)] == [0, 0, 0, 1, 1, 1]
    assert len({result["text"] for result in found.values()}) == 6
    assert 0 <= task.scores(found)["self_bleu"].value < 50


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="copies 1 is too few"):
        make_task(copies=1)
    with pytest.raises(ValueError, match="temperature 0 gives the same"):
        make_task(temperature=0.0)
