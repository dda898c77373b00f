"""README's first snippet runs as it stands, and SmolLM2 answers at the defaults."""

import re
from pathlib import Path

import pytest

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.calibration import layer_budgets
from h2okv.calibration.factors import Shares
from h2okv.models.names import PACKAGED, SMOLLM2

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France?"

pytestmark = [
    pytest.mark.skipif(PACKAGED[SMOLLM2].find() is None, reason="SmolLM2 is not on this machine"),
    pytest.mark.skipif(CACHE != "cache", reason="transformers 5.24 named the argument `cache`"),
]


def snippet():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```\n```\n(.*?)```", text, re.DOTALL).groups()


@pytest.mark.parametrize("measures", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_snippet_prints_an_answer_and_the_bytes(capsys, monkeypatch, tmp_path, measures):
    code, expected = snippet()
    assert len(code.splitlines()) <= 10
    if not measures:  # which takes longer than all of it
        even = Shares((0.1,), ((1.0,) * 30,), (((1.0,) * 3,) * 30,))
        monkeypatch.setattr(layer_budgets, "measure_shares", lambda *_, **__: even)
        monkeypatch.setattr(layer_budgets, "cache_folder", lambda kind: tmp_path)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    answer, size = capsys.readouterr().out.strip().rsplit("\n", 1)
    cache = names["cache"]
    assert size == f"{cache.nbytes:,} bytes; a full cache: {cache.full_nbytes:,}"
    assert cache.nbytes < 0.31 * cache.full_nbytes and "best" in repr(cache)
    assert "tidal power station" in answer
    if measures:
        assert expected.splitlines()[-1].split("; ")[1] == size.split("; ")[1]
        page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
        names["cache"] = h2okv.H2OCache(names["model"], "best", budget=0.2)
        (explains,) = re.findall(r"```python\n(cache\.record_evictions.*?)```", page, re.DOTALL)
        exec(compile(explains, "python.md", "exec"), names)
        assert f"`{capsys.readouterr().out.strip()}`" in page


@pytest.fixture(scope="module")
def loaded():
    return h2okv.load(SMOLLM2)


def answer(loaded, question, cache, new=24):
    model, tokenizer = loaded
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, cache=cache, max_new_tokens=new, do_sample=False)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def test_defaults_answer_a_short_question(loaded):
    model, _ = loaded
    for cache in (h2okv.H2OCache(model), h2okv.H2OCache(model.config), h2okv.H2OCache(model, 0.1)):
        assert answer(loaded, QUESTION, cache) == "The capital of France is Paris."
    diary = "Give me three reasons to keep a diary"
    full = answer(loaded, diary, h2okv.H2OCache(model, budget="full"), 60)
    assert answer(loaded, diary, h2okv.H2OCache(model), 60) == full


def test_the_engines_defaults_answer_a_short_question():
    with h2okv.LLM(SMOLLM2, max_num_seqs=1, max_prompt_tokens=512) as llm:
        assert llm.chat(QUESTION)[0].text == "The capital of France is Paris."
