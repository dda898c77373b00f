import ast
import json

from h2okv.assets import bundled_model_path, calibration_texts, sample_prompt
from h2okv.calibration.factors import WINDOW


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


def test_each_calibration_text_has_four_characters_for_each_token_of_a_window():
    story, code, *others = calibration_texts()
    assert story == sample_prompt() and len(others) == 2
    ast.parse(code)
    for text in (code, *others):
        assert len(text) > 4 * WINDOW
