"""Vision-language models behind the engine: tokens of `generate`, from folders as on the Hub."""

import pytest
import torch
from PIL import Image
from tiny_vlm import encoded, picture, save_tiny_vlm, tiny_tokenizer
from vision_table import IMAGE, VISION_FAMILIES, tiny_vision_model

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.prompts.images import IMAGE_TYPES, EncodedPrompt
from h2okv.prompts.messages import read_conversation
from h2okv.prompts.readers import FieldError

every_family = pytest.mark.parametrize("family", VISION_FAMILIES, ids=lambda family: family.name)
BUDGET = {"heavy": 6, "recent": 4, "sink": 1}
CUTS = {
    "one block": {},
    "chunks": {"evict_every": 8},
    "spans": {"evict_every": 8, "max_prompt_tokens": 200},
    "expected": {"evict_every": 8, "scoring": "expected", "max_prompt_tokens": 200},
}
GREEDY = h2okv.SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _number_words(monkeypatch):
    """SmolVLM's processor is not made without a package that only its videos need."""
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", str)


@pytest.fixture
def folder(family, tmp_path):
    return str(save_tiny_vlm(tmp_path, family.model_type))


def user(*contents):
    """Make a message of texts and pictures."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": content}
            if isinstance(content, str)
            else {"type": "image", "image": content}
            for content in contents
        ],
    }


CHATS = [
    [user(picture(), "What is it?")],
    [{"role": "user", "content": "No picture here, and that is long enough to evict."}],
    [user(picture(32, 16, 1), "Is this", picture(16, 24, 2), "the other?")],
    [user(picture(24, 16, 3), "a"), {"role": "assistant", "content": "b"}, user("And now?")],
    [{"role": "user", "content": "Two."}],
    # A turn that brings another one.
    [user("Look: ", picture(16, 16, 4)), {"role": "assistant", "content": "c"}, user(picture())],
]


def alone(model, prompt, pins=(), **options):
    """Return the tokens that ``generate`` appends to a prompt, and their log-probabilities."""
    ids = torch.tensor([prompt.token_ids])
    cache = h2okv.H2OCache(model.config, **(options if "heavy" in options else BUDGET | options))
    cache.pin(pins)
    with h2okv.enable(model):
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), **prompt.inputs, **{CACHE: cache},
            max_new_tokens=8, do_sample=False, eos_token_id=None, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    tokens = output.sequences[0, ids.shape[1] :]
    logprobs = torch.cat(output.logits).log_softmax(-1)
    return tokens.tolist(), logprobs.gather(1, tokens.unsqueeze(1)).flatten()


def test_the_table_and_the_engine_know_the_same_types():
    assert sorted(family.model_type for family in VISION_FAMILIES) == list(IMAGE_TYPES)


@every_family
@pytest.mark.parametrize("cut", CUTS.values(), ids=[*CUTS])
def test_requests_with_images_share_rows_with_others_and_give_what_generate_gives(
    family, cut, folder
):
    with h2okv.LLM(folder, max_num_seqs=3, max_prefill_tokens=16, **BUDGET, **cut) as llm:
        prompts = [llm.engine.encode(read_conversation({"messages": chat})) for chat in CHATS]
        # Twice: the second time states of text prompts may be reused.
        outputs = [*llm.chat(CHATS, GREEDY), *llm.chat(CHATS, GREEDY)]
        model = llm.engine.model
        assert "images: " in llm.describe()
    assert any(len(prompt.token_ids) > 32 for prompt in prompts)
    lines = set()
    options = {name: cut[name] for name in ("evict_every", "scoring") if name in cut}
    expected_alone = [alone(model, prompt, **options) for prompt in prompts] * 2
    for prompt, output, expected_output in zip(prompts * 2, outputs, expected_alone, strict=True):
        expected, logprobs = expected_output
        completion = output.completions[0]
        assert output.prompt.token_ids == prompt.token_ids
        assert completion.token_ids == expected
        measured = torch.tensor([logprob.logprob for logprob in completion.logprobs])
        torch.testing.assert_close(measured, logprobs, atol=1e-4, rtol=0)
        assert output.prompt.num_reused == 0 or not prompt.inputs
        lines.add(tuple(measured.tolist()))
    assert len(lines) >= len(CHATS)


@every_family
def test_pixels_matter_and_texts_with_placeholders_are_prompts_too(family, folder):
    with h2okv.LLM(folder, **BUDGET) as llm:
        chat = [user(picture(), "What?")]
        (expected,) = llm.chat(chat, GREEDY)
        (other,) = llm.chat([user(picture(seed=5), "What?")], GREEDY)
        text = llm.tokenizer.apply_chat_template(
            [user(picture(), "What?")], tokenize=False, add_generation_prompt=True
        )
        (output,) = llm.generate({"prompt": text, "images": [picture()]}, GREEDY)
        assert output.completions == expected.completions
        assert output.completions[0].logprobs != other.completions[0].logprobs
        with pytest.raises(FieldError, match=r"images\[0\]: .* give one <.*> for each"):
            llm.generate({"prompt": "no place", "images": [picture()]}, GREEDY)
        with pytest.raises(ValueError, match="image is not known; did you mean images"):
            llm.generate({"prompt": "no images", "image": picture()}, GREEDY)
        with pytest.raises(ValueError, match="images is empty; give at least one image"):
            llm.generate({"prompt": "no images", "images": []}, GREEDY)
        with pytest.raises(ValueError, match="pin=user finds no messages beside images"):
            llm.chat(chat, GREEDY, pin=["user"])
    ids = expected.prompt.token_ids
    span = (ids.index(IMAGE), len(ids) - ids[::-1].index(IMAGE))
    with h2okv.LLM(folder, heavy=32, recent=4) as llm:
        prompt = llm.engine.encode(read_conversation({"messages": chat}))
        outputs = llm.generate([prompt, prompt], GREEDY, pins=[[span], []])
        model = llm.engine.model
    for output, pins in zip(outputs, ([span], []), strict=True):
        tokens, _ = alone(model, prompt, pins, heavy=32, recent=4)
        assert output.completions[0].token_ids == tokens


@pytest.mark.parametrize("family", VISION_FAMILIES[:1], ids=lambda family: family.name)
def test_a_loaded_model_reads_images_by_its_processor(family, folder):
    from transformers import AutoProcessor

    model, processor = tiny_vision_model(family), AutoProcessor.from_pretrained(folder)
    chat = [user(picture(), "What?")]
    with h2okv.LLM(folder, **BUDGET) as llm:
        expected = llm.chat(chat, GREEDY)
    with h2okv.LLM(model, processor, **BUDGET) as llm:
        (output,) = llm.chat(chat, GREEDY)
        assert output.completions[0].token_ids == expected[0].completions[0].token_ids
    tokenizer = tiny_tokenizer(family.model_type)
    with (
        h2okv.LLM(model, tokenizer, **BUDGET) as llm,
        pytest.raises(
            FieldError, match="this llava model has no name, so its processor is unknown"
        ),
    ):
        llm.chat(chat, GREEDY)


@pytest.mark.parametrize("family", VISION_FAMILIES[4:5], ids=lambda family: family.name)
def test_a_text_in_blocks_after_an_image_has_its_own_positions(family, folder):
    model = tiny_vision_model(family)
    with h2okv.LLM(folder, **BUDGET) as llm:
        prompt = llm.engine.encode(read_conversation({"messages": CHATS[0]}))
    ids = torch.arange(6, 46).unsqueeze(0)

    def read():
        cache = h2okv.H2OCache(model.config, heavy=50, recent=50, evict_every=8)
        return h2okv.prefill(model, ids, cache)

    expected = read()
    alone(model, prompt)
    torch.testing.assert_close(read(), expected)


def test_a_model_of_text_refuses_images(make_llama):
    with (
        h2okv.LLM(make_llama(), tiny_tokenizer("llava"), **BUDGET) as llm,
        pytest.raises(FieldError, match="not supported with model type 'llama'.* gemma3, llava"),
    ):
        llm.chat([user(picture(), "What?")], GREEDY)


def test_broken_huge_and_unknown_images_are_refused():
    bomb = Image.new("1", (8192, 4097))  # a small file of many pixels
    bad = {
        "not an image that can be read; give a PNG, JPEG, WEBP, GIF file": [
            encoded(picture())[:60], b"", b"<svg/>", encoded(picture(), "BMP"),
        ],
        "of 8192 x 4097 pixels brings the prompt's images to 33,562,624": [encoded(bomb)],
    }  # fmt: skip
    from h2okv.prompts.images import open_images
    from h2okv.prompts.messages import ImagePart

    for words, files in bad.items():
        for data in files:
            with pytest.raises(FieldError, match=words):
                open_images([ImagePart(data, ("image",), "'shown'")])
    half = ImagePart(encoded(Image.new("1", (4096, 4096))), ("image",), "'shown'")
    assert len(open_images([half, half])) == 2
    with pytest.raises(FieldError, match="pixels brings the prompt's images to 50,331,648"):
        open_images([half, half, half])
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        (image,) = open_images([ImagePart(encoded(picture(), kind), ("image",), "")])
        assert image.mode == "RGB" and image.size == (24, 16)
    assert EncodedPrompt((1,)).inputs == {}


def test_without_pillow_the_error_says_how_to_get_it(monkeypatch):
    import importlib

    from h2okv.prompts import images

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"Pillow is not installed.*pip install '.\[images\]'"):
        images.open_images([])
