import json

from h2okv.assets import bundled_model_path, sample_prompt


def test_the_bundled_model_is_there():
    folder = bundled_model_path()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] >= 1024
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).is_file()


def test_the_sample_prompt_fills_a_context_of_a_thousand_tokens():
    text = sample_prompt()
    assert len(text.split()) > 2000
    assert text.startswith("To Sherlock Holmes she is always THE woman.")
