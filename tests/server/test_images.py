"""Images in requests of the official client, on a tiny vision-language model from its folder."""

import base64

import openai
import pytest
from PIL import Image
from tiny_vlm import data_url, encoded, picture, save_tiny_vlm

import h2okv
from h2okv.prompts.messages import read_conversation

QUESTION = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_vlm(tmp_path_factory.mktemp("vlm"), "qwen2_5_vl"))


@pytest.fixture(scope="module")
def served(start, folder):
    engine = h2okv.AsyncLLM(folder, max_num_seqs=3, heavy=6, recent=4, evict_every=8)
    served = start(engine, model_name="tiny")
    yield served
    served.stop()


def url_part(image, **more):
    return {"type": "image_url", "image_url": {"url": data_url(image), **more}}


def chat(client, *contents, **options):
    messages = [{"role": "user", "content": list(contents)}]
    options = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}, **options}
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_an_image_question_gets_the_engine_s_answer(served, folder):
    contents = [url_part(picture(), detail="low"), QUESTION]
    answer = chat(served.client(), *contents)
    messages = [{"role": "user", "content": contents}]
    params = h2okv.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with h2okv.LLM(folder, heavy=6, recent=4, evict_every=8) as llm:
        (expected,) = llm.chat(messages, params)
        prompt = llm.engine.encode(read_conversation({"messages": messages}))
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == len(prompt.token_ids) > 30
    stream = chat(served.client(), *contents, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == expected.text
    response = served.client().responses.create(
        model="tiny",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": data_url(picture()), "detail": "auto"},
                    {"type": "input_text", "text": "What is it?"},
                ],
            }
        ],
        max_output_tokens=6,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert response.output_text == expected.text


def test_images_and_texts_run_together_and_turns_go_on(served):
    client = served.client()
    first = chat(client, url_part(picture(seed=3)), QUESTION)
    alone = [chat(client, QUESTION), chat(client, url_part(picture(seed=3)), QUESTION)]
    assert alone[1].choices[0].message.content == first.choices[0].message.content
    assert alone[0].choices[0].message.content != first.choices[0].message.content
    answer = first.choices[0].message.content
    messages = [
        {"role": "user", "content": [url_part(picture(seed=3)), QUESTION]},
        {"role": "assistant", "content": answer},
        {
            "role": "user",
            "content": [url_part(picture(seed=4)), {"type": "text", "text": "And this?"}],
        },
    ]
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0, "n": 2}
    second = client.chat.completions.create(messages=messages, **options)
    again = client.chat.completions.create(messages=messages, **options)
    texts = [choice.message.content for choice in (*second.choices, *again.choices)]
    assert len(set(texts)) == 1


BOMB = Image.new("1", (8192, 4097))  # a small file of many pixels


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("http://example.org/a.png", "='http://example.org/a.png' is not a data URL"),
        ("/etc/passwd", "nothing is fetched"),
        ("data:image/png;base64,iVBORw0K", "is not an image that can be read"),
        (data_url(picture())[:-60] + "AAAA", "is not an image that can be read; give a PNG"),
        (data_url(picture(), "BMP"), "is not an image in base64"),
        (data_url(BOMB), "of 8192 x 4097 pixels brings the prompt's images to 33,562,624"),
        (data_url(picture())[:-1], "is not base64"),
    ],
)
def test_bad_images_are_refused_in_a_sentence(served, image, words):
    image_part = {"type": "image_url", "image_url": {"url": image}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(served.client(), QUESTION, image_part)
    body = caught.value.body
    assert body["param"] == "messages[0].content[1].image_url.url"
    assert words in body["message"] and len(body["message"]) < 300
    assert body["message"].count("\n") == 0


def test_a_prompt_too_long_with_its_image_is_refused(served):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(served.client(), *[url_part(picture(32, 16))] * 16)
    assert caught.value.body["code"] == "context_length_exceeded"


def test_truncated_images_of_every_kind_are_refused(served):
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        file = encoded(picture(), kind)
        cut = base64.b64encode(file[: len(file) // 2]).decode()
        with pytest.raises(openai.BadRequestError, match="is not an image that can be read"):
            url = f"data:image/{kind.lower()};base64,{cut}"
            chat(served.client(), {"type": "image_url", "image_url": {"url": url}})
