"""Writes the support table from the rows that the tests run.

python tests/families/support_table.py           refresh docs/support-table.md
python tests/families/support_table.py --check   only say whether it is up to date
"""

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

from family_table import FAMILIES, Family  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402

from h2okv.cache import support  # noqa: E402

DOCUMENT = ROOT / "docs" / "support-table.md"
README = ROOT / "README.md"

_INTRODUCTION = """\
Every row runs on a tiny random config in `tests/families`, with as many KV heads as query heads
(MHA) and with fewer (GQA) where the config has the choice: a budget of the whole length gives the
full cache's logits and text, dropping keeps exactly what masking keeps, and a left-padded row gives
what it gives alone. Layers that are not full attention keep transformers' own cache. All but OPT
and the GPT-2 kind, whose positions are learned, also roll their positions past the context window.
"""
_OTHERS = """\
Other model types are untested: they work, or stop with an error where their attention asks for what
H2O does not model. A model in which every layer has a sliding window (Mistral-7B v0.1,
Phi-3-mini-4k) or is recurrent (Mamba) has nothing for H2O to evict and is refused. So are, by name
or by their config:
"""


def _reason(**settings: object) -> str | None:
    config = PreTrainedConfig(**settings)
    return support._refusal(config, config)


_BY_CONFIG = {
    "DeepSeek-V2, DeepSeek-V3, Kimi, MiniCPM3 and others with `kv_lora_rank`": _reason(
        kv_lora_rank=1
    ),
    "Gemma 3n, Gemma 4 with `num_kv_shared_layers`": _reason(num_kv_shared_layers=1),
    "DeepSeek-V3.2, GLM-5 and others with indexed attention": _reason(
        layer_types=["indexed_attention"]
    ),
    "T5, BART and other encoder-decoder models": "H2O is defined for decoder-only models",
}


def _heads(family: Family) -> str:
    if family.kv_heads is None:
        return "MQA" if "one KV head" in family.note else "MHA"
    return ", ".join("MHA" if heads == 4 else "GQA" for heads in family.kv_heads)


def table() -> str:
    """The families and the refusals in Markdown."""
    lines = [_INTRODUCTION, "| Family | Model type | Heads | Remarks |", "|---|---|---|---|"]
    for family in FAMILIES:
        lines.append(
            f"| {family.name} | `{family.model_type}` | {_heads(family)} | {family.note} |"
        )
    lines += ["", _OTHERS, "| Refused | Why |", "|---|---|"]
    lines += [f"| {models} | {reason} |" for models, reason in _BY_CONFIG.items()]
    reasons = defaultdict(list)
    for model_type in sorted(support.REFUSED):
        reasons[support.REFUSED[model_type]].append(f"`{model_type}`")
    lines += [f"| {', '.join(types)} | {reason} |" for reason, types in reasons.items()]
    return "\n".join(lines) + "\n"


def document() -> str:
    """The whole of docs/support-table.md."""
    return f"# Models\n\n{table()}"


def main(arguments: list[str]) -> int:
    """Writes or checks the document; returns the exit code."""
    if DOCUMENT.exists() and DOCUMENT.read_text(encoding="utf-8") == document():
        return 0
    if "--check" in arguments:
        print(f"{DOCUMENT.relative_to(ROOT)} is out of date; run {Path(__file__).name}")
        return 1
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
