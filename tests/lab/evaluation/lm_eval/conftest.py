"""Tiny data files in the six formats, the bundled model in both harness classes, and its tasks."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from h2okv.assets import bundled_model_path

TASKS = ("copa", "rte", "piqa", "openbookqa", "winogrande", "mathqa")
COPA_ITEM = (
    '<item id="{id}" asks-for="{asks}" most-plausible-alternative="{best}">'
    "<p>{premise}</p><a1>{first}</a1><a2>{second}</a2></item>"
)


def write_data(folder):
    """Write four documents for each task, in the formats of the published files."""
    (folder / "piqa").mkdir()
    (folder / "llm_adapters").mkdir()
    items = [
        (1, "cause", 1, "The ground was wet.", "It had rained.", "The sun shone."),
        (2, "effect", 2, "The boy was tired.", "He ran home.", "He went to bed."),
        (3, "cause", 2, "The dog barked.", "It was asleep.", "A stranger came."),
        (4, "effect", 1, "The glass fell.", "It broke.", "It sang."),
        (1001, "cause", 2, "The ground was dry.", "It had rained.", "The sun shone."),
    ]
    names = ("id", "asks", "best", "premise", "first", "second")
    xml = "".join(COPA_ITEM.format(**dict(zip(names, item, strict=True))) for item in items)
    (folder / "copa_balanced_dev.xml").write_text(f"<copa-corpus>{xml}</copa-corpus>")
    pairs = [("The sky is blue over London.", word) for word in ("sky", "sea", "king", "cat")]
    rte = [
        {"premise": premise, "hypothesis": f"The {word} is blue.", "label": label}
        for (premise, word), label in zip(pairs, ["entailment", "not_entailment"] * 2, strict=True)
    ]
    (folder / "rte_val.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rte))
    piqa = [
        {"goal": f"Cool {drink}.", "sol1": "Put it on ice.", "sol2": "Put it in the fire."}
        for drink in ("water", "soup", "wine", "tea")
    ]
    (folder / "piqa/valid.jsonl").write_text("".join(json.dumps(line) + "\n" for line in piqa))
    (folder / "piqa/valid-labels.lst").write_text("0\n0\n0\n0\n")
    head = "ID\tQuestion Stem\tChoices\tComplete Question\tAnswer Key\n"
    for split in ("dev", "test"):
        rows = [
            f"{i}\tThe sun is in split {split} {i}\t(A) a star (B) a moon (C) wet (D) cold\t-\tA\n"
            for i in range(4)
        ]
        (folder / f"openbookqa_{split}.tsv").write_text(head + "".join(rows))
    blank = (
        "Please choose the correct answer to fill in the blank to complete the given sentence: "
        "{name} saw Mary because _ looked up.\n\nOption1: {name} Option2: Mary "
        "Answer format: option1/option2"
    )
    winogrande = [
        {"instruction": blank.format(name=name), "answer": "option1"}
        for name in ("John", "Tom", "Anne", "Jane")
    ]
    (folder / "llm_adapters/winogrande_test.json").write_text(json.dumps(winogrande))
    options = "A ) 1 , B ) 2 , C ) 1 , 000 , D ) nonE , E ) 5 Cm"
    listed = "['A ) 1', 'B ) 2', 'C ) 3', 'D ) 4', 'E ) 5']"
    mathqa = [
        {"instruction": f"what is {i} + 1 ? The options: {listed if i % 2 else options}",
         "answer": "B"}
        for i in range(4)
    ]  # fmt: skip
    (folder / "llm_adapters/mathqa_test.json").write_text(json.dumps(mathqa))


@pytest.fixture
def tiny_data(tmp_path, add_task_files):
    """Return a folder of small data files and the tasks that read them."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_data(folder)
    return add_task_files(folder)


@pytest.fixture(scope="session")
def bundled():
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(bundled_model_path())


@pytest.fixture
def harness_model(bundled):
    """Make the harness's model: ours with settings, its own without."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (h2okv[eval])")
    from lm_eval.models.huggingface import HFLM

    from h2okv_lab.evaluation.lm_eval.model import H2OLM

    def make(*, is_plain=False, **options):
        model, tokenizer = bundled
        if is_plain:
            model.set_attn_implementation("sdpa")
        kind = HFLM if is_plain else H2OLM
        return kind(pretrained=model, tokenizer=tokenizer, batch_size=16, **options)

    yield make
    bundled[0].set_attn_implementation("sdpa")


@pytest.fixture
def evaluate(monkeypatch):
    """Run tasks through the harness; return its results and each sample's log-probabilities."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from h2okv_lab.evaluation.lm_eval import task_manager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Collecting installed packages takes longer than everything else.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)

    def run(model, data, tasks=TASKS, shots=0, limit=4):
        results = lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), num_fewshot=shots, limit=limit, bootstrap_iters=0,
            task_manager=task_manager(data, tasks, "tasks")(),
        )  # fmt: skip
        scores = {
            (task, sample["doc_id"]): [answer[0][0] for answer in sample["resps"]]
            for task, samples in results["samples"].items()
            for sample in samples
        }
        return results, scores

    return run
