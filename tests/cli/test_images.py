"""`h2okv generate --image` on a tiny vision-language model from its folder."""

import json

import pytest
from tiny_vlm import picture, save_tiny_vlm

import h2okv


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    return str(save_tiny_vlm(tmp_path_factory.mktemp("vlm"), "gemma3"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    picture().save(folder / "a.png")
    picture(40, 30, 2).save(folder / "b.jpg")
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:80])
    (folder / "empty.png").write_bytes(b"")
    return folder


def test_images_come_before_the_prompt(h2okv_command, vlm, images):
    options = ["--model", vlm, "--policy", "h2o", "--budget", "6+4"]
    files = ["--image", str(images / "a.png"), "--image", str(images / "b.jpg")]
    end = ["--max-new-tokens", "6", "--temperature", "0", "--json"]
    outcome = h2okv_command("generate", "What?", *options, *files, *end)
    assert outcome.code == 0
    fields = json.loads(outcome.out)
    contents = [{"type": "image", "image": picture()}]
    from PIL import Image

    contents.append({"type": "image", "image": Image.open(images / "b.jpg")})
    contents.append({"type": "text", "text": "What?"})
    params = h2okv.SamplingParams(max_tokens=6, temperature=0)
    with h2okv.LLM(vlm, heavy=6, recent=4) as llm:
        (expected,) = llm.chat([{"role": "user", "content": contents}], params)
    assert fields["token_ids"] == expected.completions[0].token_ids
    assert fields["prompt_tokens"] == len(expected.prompt.token_ids) > 40


@pytest.mark.parametrize("options", [[], ["--compare", "full"], ["--cache", "every=8"]])
def test_defaults_and_comparisons(h2okv_command, vlm, images, options):
    file = str(images / "a.png")
    outcome = h2okv_command(
        "generate", "What?", "--model", vlm, "--image", file, "--max-new-tokens", "4", *options
    )
    assert outcome.code == 0, outcome.err
    assert ("4 of 4" in outcome.out) == ("--compare" in options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("a.png", ["--model", "bundled"], "are not supported with model type 'llama'; leave them"),
        ("broken.png", [], "is not an image that can be read; give a PNG, JPEG, WEBP, GIF file"),
        ("empty.png", [], "has 0 bytes; give an image of 1 to"),
        ("missing.png", [], "cannot be read (No such file or directory); give an image"),
        ("a.png", ["--raw"], "give one <start_of_image> for each"),
        ("a.png", ["--pin", "user"], "pin=user finds no messages beside images"),
    ],
)
def test_bad_images_end_in_one_line(h2okv_command, vlm, images, name, options, words):
    model = [] if "--model" in options else ["--model", vlm]
    outcome = h2okv_command("generate", "What?", "--image", str(images / name), *model, *options)
    assert outcome.code == 2 and outcome.out == ""
    assert words in outcome.err and outcome.err.strip().count("\n") == 0
