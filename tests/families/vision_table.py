"""The vision-language families: a tiny random model of each, and a prompt with images for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

PAD, IMAGE, VOCABULARY = 0, 2, 89
PIXELS = 16  # of a side of an image
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    # As in `family_table`: attention is far from uniform, so that evictions matter.
    "initializer_range": 0.3,
}
_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": PIXELS, "patch_size": 4, "initializer_range": 0.3,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 1, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1,
    "initializer_range": 0.3,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
Pixels = Callable[[list[int]], dict[str, torch.Tensor]]


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(*shape, generator=generator)


def _pictures(counts: list[int]) -> dict[str, torch.Tensor]:
    return {"pixel_values": _random(sum(counts), 3, PIXELS, PIXELS)}


def _rows_of_pictures(counts: list[int]) -> dict[str, torch.Tensor]:
    """SmolVLM pads a sequence with fewer pictures by pictures of zeros."""
    pixels = _random(len(counts), max(counts), 3, PIXELS, PIXELS)
    for row, count in enumerate(counts):
        pixels[row, count:] = 0
    return {"pixel_values": pixels}


def _patches(size: int) -> Pixels:
    """Qwen-VL takes patches; each image is 4 by 8 of them, merged to 2 by 4 tokens."""

    def make(counts: list[int]) -> dict[str, torch.Tensor]:
        grid = torch.tensor([[1, 4, 8]]).repeat(sum(counts), 1)
        return {"pixel_values": _random(32 * sum(counts), size), "image_grid_thw": grid}

    return make


@dataclass(frozen=True, eq=False)
class VisionFamily:
    """A line of the support table.

    Attributes:
        name: as users call it.
        model_type: transformers' name.
        options: of the tiny config.
        image_tokens: tokens of an image in a prompt.
        pixels: makes the inputs beside the tokens, for the number of images of each sequence.
        types: the input that marks the tokens of images, if the model takes one.
        note: for the table.
    """

    name: str
    model_type: str
    options: dict[str, Any]
    image_tokens: int
    pixels: Pixels
    types: str | None = None
    note: str = ""
    text: dict[str, Any] = field(default_factory=dict)


_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 3,
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
}
_MROPE_NOTE = "positions of three axes; no rolling positions"

VISION_FAMILIES = (
    VisionFamily(
        "Llava", "llava",
        {"vision_config": {"model_type": "clip_vision_model", **_TOWER},
         "text_config": {"model_type": "llama", **_TEXT}, "image_token_index": IMAGE,
         "vision_feature_layer": -1},
        16, _pictures,
    ),
    VisionFamily(
        "SmolVLM", "smolvlm",
        {"vision_config": {"model_type": "smolvlm_vision", **_TOWER},
         "text_config": {"model_type": "llama", **_TEXT}, "image_token_id": IMAGE,
         "scale_factor": 2},
        4, _rows_of_pictures,
    ),
    VisionFamily(
        "Gemma 3", "gemma3",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
            "text_config": {
                **_TEXT, "head_dim": 12, "query_pre_attn_scalar": 4,
                "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
            },
            "image_token_index": IMAGE, "mm_tokens_per_image": 16,
        },
        16, _pictures, "token_type_ids",
        note="tokens of an image see each other both ways; no cut falls inside an image",
    ),
    VisionFamily(
        "Qwen2-VL", "qwen2_vl",
        {"vision_config": {**_QWEN_TOWER, "embed_dim": 16, "hidden_size": 32},
         "text_config": {**_TEXT, "rope_parameters": _MROPE}, **_QWEN_IDS},
        8, _patches(3 * 2 * 2), "mm_token_type_ids", _MROPE_NOTE,
    ),
    VisionFamily(
        "Qwen2.5-VL", "qwen2_5_vl",
        {
            "vision_config": {
                **_QWEN_TOWER, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
                "window_size": 8, "fullatt_block_indexes": [0],
            },
            "text_config": {**_TEXT, "rope_parameters": _MROPE}, **_QWEN_IDS,
        },
        8, _patches(3 * 2 * 2), "mm_token_type_ids", _MROPE_NOTE,
    ),
    VisionFamily(
        "Qwen3-VL", "qwen3_vl",
        {
            "vision_config": {
                **_QWEN_TOWER, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
                "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
            },
            "text_config": {**_TEXT, "head_dim": 8, "rope_parameters": _MROPE}, **_QWEN_IDS,
        },
        8, _patches(3 * 2 * 2), "mm_token_type_ids", _MROPE_NOTE,
    ),
)  # fmt: skip


@lru_cache(maxsize=8)
def tiny_vision_model(family: VisionFamily) -> PreTrainedModel:
    """Return the family's random model."""
    config = AutoConfig.for_model(family.model_type, **family.options, pad_token_id=PAD)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "projection_weight" in name:  # Gemma 3's begins at zero, which would hide its images
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    return model


def image_inputs(
    family: VisionFamily, prompts: list[list[int | str]], seed: int = 1
) -> dict[str, torch.Tensor]:
    """Return the inputs of prompts, padded on the left: numbers of text tokens, and ``"image"``."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for prompt in prompts:
        row: list[int] = []
        for piece in prompt:
            if piece == "image":
                # Qwen-VL puts an image between two tokens.
                row += [4, *[IMAGE] * family.image_tokens, 5]
            else:
                row += torch.randint(6, VOCABULARY, (int(piece),), generator=generator).tolist()
        rows.append(row)
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if family.types is not None:
        inputs[family.types] = (ids == IMAGE).int()
    return inputs | family.pixels([prompt.count("image") for prompt in prompts])
