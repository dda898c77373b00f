"""Each mistake gives one sentence with option, value and remedy, and exit code 2."""

import io
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, T5Config

WIDE_PROMPT = "the cat sat on the mat " * 200


def assert_one_sentence(outcome, *words):
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("h2okv: ")
    assert outcome.err.endswith(".\n")
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


OPTIONS = {
    "budget beyond the window": (
        ("--policy", "h2o", "--cache", "positions=rolling", "--budget", "200+100"),
        ("budget of 300", "window of 256"),
    ),
    "budget of zero": (("--budget", "0+0"), ("heavy=0", "recent=0")),
    "invalid amount": (("--budget", "lots"), ("--budget 'lots'", "--budget 64")),
    "budget beyond all counts": (("--budget", "9" * 20), ("is too large", "9007199254740992")),
    "budget of the full cache": (
        ("--policy", "full", "--budget", "20%"),
        ("--budget 20% has no effect, as policy full keeps all entries",),
    ),
    "two budgets": (("--budget", "0,1"), ("budget 0 is too small",)),
    "amount that is not finite": (("--budget", "nan"), ("--budget 'nan'",)),
    "decay above 1": (("--cache", "scoring=decay:1.5"), ("got 1.5", "0.995")),
    "decay without its scoring": (("--cache", "scoring=sum:0.9"), ("decay=0.9", "scoring='decay'")),
    "scoring of no use": (
        ("--cache", "scoring=mean", "--policy", "recent"), ("scoring='mean'", "policy='recent'"),
    ),
    "negative temperature": (
        ("--temperature", "-1"), ("--temperature must be", "0 to 100, got -1"),
    ),
    "infinite temperature": (("--temperature", "inf"), ("--temperature must be", "got inf")),
    "top-p above 1": (
        ("--temperature", "1", "--top-p", "1.1"), ("--top-p must be a number from 0 to 1",),
    ),
    "top-p without sampling": (("--top-p", "0.9"), ("--top-p 0.9", "--temperature")),
    "invalid seed": (("--seed", "x"), ("--seed", "--help")),
    "top-k without sampling": (("--top-k", "5"), ("--top-k 5", "--temperature")),
    "penalty of zero": (("--repetition-penalty", "0"), ("--repetition-penalty must be",)),
    "unknown option": (("--heavi", "1"), ("--heavi", "--help")),
    "empty prompt": (("",), ("prompt is empty",)),
    "blank prompt": (("  \n",), ("prompt is empty",)),
    "prompt that is not text": (("\udcff",), ("not UTF-8",)),
    "prompt beyond the context": (
        (WIDE_PROMPT,), ("tokens", "context", "256", "--cache positions=rolling"),
    ),
    "prompt given twice": (
        ("--file", __file__, "a prompt"),
        ("both an argument and in --file", "leave one of them out"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("args", "words"), OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("json_option", [(), ("--json",)], ids=["text", "json"])
def test_options(h2okv_command, model_folder, args, words, json_option):
    needs_prompt = all(arg.startswith("-") or i % 2 for i, arg in enumerate(args))
    prompt = ("a prompt",) if needs_prompt and "--file" not in args else ()
    outcome = h2okv_command("generate", "--model", model_folder, *json_option, *args, *prompt)
    assert_one_sentence(outcome, *words)


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "prompt is empty"), (b"caf\xe9", "stdin is not UTF-8")]
)
def test_stdin(h2okv_command, model_folder, monkeypatch, data, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert_one_sentence(h2okv_command("generate", "--model", model_folder), words)


def test_no_prompt_at_a_terminal(h2okv_command, model_folder, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    outcome = h2okv_command("generate", "--model", model_folder)
    assert_one_sentence(outcome, "no prompt", "--file", "stdin")


def test_unknown_command(h2okv_command):
    outcome = h2okv_command("generat")
    assert_one_sentence(outcome, "Did you mean 'generate'? See h2okv --help.")
    assert_one_sentence(h2okv_command("xyz"), "'xyz'; see h2okv --help.")
    outcome = h2okv_command("generate", "--heavi", "1")
    assert_one_sentence(outcome, "--heavi", "h2okv generate --help")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "--verify", "repai", "x"), ("--verify 'repai'", "--verify repair", "alone")),
        (("generate", "--verify", "repairs"), ("--verify 'repairs'",)),
        (("generate", "--verify=2%", "x"), ("--verify '2%'",)),
        (("generate", "--verify", "2%", "x"), ("argument(s) (x)", "no value but repair")),
        (("chat", "--verify", "all"), ("(all)", "--verify takes no value but repair")),
        (
            ("serve", "--verify", "2%", "--tensor-parallel", "2"),
            ("argument(s) (2); see h2okv serve",),
        ),
        (("generate",), ("the prompt is empty", "some text")),
        (("generate", "--model"), ("'--model' requires an argument", "h2okv generate --help")),
    ],
    ids=str,
)
def test_verify_names_its_values(h2okv_command, monkeypatch, args, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert_one_sentence(h2okv_command(*args), *words)


def test_an_argument_given_as_an_option(h2okv_command):
    assert_one_sentence(h2okv_command("plan", "--model", "bundled"), "--model", "value alone")


def test_demo_without_room_for_a_prompt(h2okv_command, model_folder):
    outcome = h2okv_command("demo", "--model", model_folder, "--max-new-tokens", 256)
    assert_one_sentence(outcome, "--max-new-tokens 256", "fewer")


def edit_config(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | values))


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def spoil_weights(folder, name, value):
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name].view(-1)[7] = value
    save_file(weights, path, metadata={"format": "pt"})


def use_config(folder, config):
    (folder / "config.json").unlink()
    config.save_pretrained(folder)


NORM = "model.layers.1.input_layernorm.weight"
CHECKPOINTS = {
    "no config": (lambda f: (f / "config.json").unlink(), ("no config.json", "save_pretrained")),
    "broken config": (lambda f: cut(f / "config.json", 40), ("config.json", "JSON", "again")),
    "empty config": (lambda f: (f / "config.json").write_text("{}"), ("model_type",)),
    "unknown type": (lambda f: edit_config(f, model_type="blah"), ("configuration", "blah")),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("weights", "again")),
    "cut weights": (lambda f: cut(f / "model.safetensors", 5000), ("weights", "again")),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), ("weights", "again")),
    "missing layer": (lambda f: edit_config(f, num_hidden_layers=3), ("incomplete", "layers.2")),
    "other shapes": (lambda f: edit_config(f, intermediate_size=32), ("weights", "again")),
    "NaN": (lambda f: spoil_weights(f, NORM, torch.nan), ("NaN", NORM, "float32")),
    "infinity": (lambda f: spoil_weights(f, NORM, torch.inf), ("infinity", NORM)),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), ("tokenizer",)),
    "broken tokenizer": (lambda f: cut(f / "tokenizer.json", 100), ("tokenizer", "again")),
    "small vocabulary": (lambda f: edit_config(f, vocab_size=5), ("tokenizer", "be 0 to 4")),
    "encoder-decoder": (lambda f: use_config(f, T5Config()), ("'t5'", "not supported")),
    "own attention": (lambda f: use_config(f, BloomConfig()), ("'bloom'", "not supported")),
}


@pytest.mark.parametrize(("spoil", "words"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_checkpoints(h2okv_command, save_model, spoil, words):
    folder = save_model()
    spoil(folder)
    assert_one_sentence(h2okv_command("generate", "--model", folder, "a prompt"), *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere/at/all", ("does not exist", "config.json")),
        ("./nowhere", ("does not exist", "config.json")),
        (__file__, ("is a file", "folder")),
        ("no-such-user/no-such-model", ("the Hub cannot be reached", "folder")),
    ],
)
def test_missing_models_are_refused(h2okv_command, name, words):
    outcome = h2okv_command("generate", "--model", name, "a prompt")
    assert_one_sentence(outcome, repr(name), *words)


def test_model_with_an_empty_name(h2okv_command):
    assert_one_sentence(h2okv_command("generate", "--model", "", "a prompt"), "--model is empty")


OVERFLOWS = {
    # Finite in float16 each, but not what they are multiplied to.
    "attention": (
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ),
    "logits": ("model.norm.weight", "lm_head.weight"),
}


@pytest.mark.parametrize("names", OVERFLOWS.values(), ids=OVERFLOWS.keys())
def test_nan_logits_are_refused_with_a_hint_on_the_dtype(h2okv_command, save_model, names):
    folder = save_model()
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in names:
        weights[name] *= 6e4 / weights[name].abs().max()
    save_file(weights, path, metadata={"format": "pt"})
    args = ("generate", "--model", folder, "--policy", "h2o", "--json", "a prompt")
    assert_one_sentence(h2okv_command(*args, "--dtype", "float16"), "NaN", "dtype")


BEFORE_THE_WEIGHTS = {
    "serve --max-num-seqs 0": "--max-num-seqs must be a whole number of 1 or more, got 0",
    "serve --max-prompt-tokens 5000": "max_prompt_tokens=5000 is more than the model's context",
    "serve --cache sink=-1": "sink=-1",
    "view --export k.html --tokens 3": "--tokens 3 is too few; give 8 or more",
}


@pytest.mark.parametrize("line", BEFORE_THE_WEIGHTS)
def test_invalid_options_are_refused_before_the_weights_load(
    h2okv_command, model_folder, monkeypatch, tmp_path, line
):
    def load(*_):
        raise AssertionError("the weights were loaded first")

    monkeypatch.chdir(tmp_path)
    # The engine's first: its import must not copy the replaced function.
    monkeypatch.setattr("h2okv.engine.engine.load_weights", load)
    monkeypatch.setattr("h2okv.models.loading.load_weights", load)
    outcome = h2okv_command(*line.split(), "--model", model_folder)
    assert_one_sentence(outcome, BEFORE_THE_WEIGHTS[line])
