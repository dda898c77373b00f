"""Writes the support table from the rows that the tests run.

python tests/families/support_table.py           refresh docs/support-table.md
python tests/families/support_table.py --check   only say whether it is up to date
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

import walk  # noqa: E402
from family_table import FAMILIES, Family  # noqa: E402
from vision_table import VISION_FAMILIES  # noqa: E402

DOCUMENT = ROOT / "docs" / "support-table.md"
README = ROOT / "README.md"

_INTRODUCTION = """\
**Models with full-attention layers work, with MHA, GQA, MQA and MLA.** Sliding, linear and
convolution layers beside them keep transformers' own cache. If a model does not work, `H2OCache`
refuses it with the reason, before any forward.

The tests of `tests/families` run every row on a tiny random config, with as many KV heads as query
heads (MHA) and with fewer (GQA) if the config allows it. With a budget of the whole length the
logits and texts are the full cache's; dropping keeps exactly what masking keeps; and a left-padded
row gives what it gives alone. All families roll their positions past the context window, except OPT
and GPT-2, which have learned positions. `LLM` and `serve` give the tokens of `generate` for every
row except Llama 4, which they refuse for its chunked layers, and for every type below with linear
or convolution layers.
"""
_IMAGES = """\
With images in prompts, padded batches, later turns, chunks and spans pass the same tests. A cut
(`evict_every`) waits for the end of an image with tokens that see each other.
`cache.kept_positions(layer)` shows which tokens of an image remain, and `cache.pin` keeps all of
them. With `scoring="expected"` positions of three axes count as one per token, which moves scores
around an image a little. `LLM`, `serve` and `generate --image` give the same tokens and refuse
images for any other type. How well these models answer about images after an eviction was not
measured.
"""
_OTHERS = """\
## All types

`python tests/families/walk.py --write`, which writes this page, also tries every causal LM type of
transformers {transformers} with a tiny random config, by five settings: H2O; the commands' default,
`best` with factors by head; `best` with `evict_every`, and with it `kv_bits=4`, or rolling
positions. `H2OCache` accepts it, a budget above the text gives the full cache's logits (not in 4
bits), dropping equals masking, and evicting changes the output.
{count} types pass all five, except rolling positions where nothing is rotated ({rolling}): {works}.

Jamba reads a prompt in one forward and refuses several tokens after a state, because transformers
forgets the state there. The config matters too: a model in which every layer has a sliding window
(Mistral-7B v0.1, Phi-3-mini-4k), or with layers that share keys (Gemma 4 E2B), is refused, and so
are encoder-decoder models (T5).
"""


def _heads(family: Family) -> str:
    if family.kv_heads is None:
        if family.note.startswith("MLA"):
            return "MLA"
        return "MQA" if "one KV head" in family.note else "MHA"
    return ", ".join("MHA" if heads == 4 else "GQA" for heads in family.kv_heads)


def _listed(types: str) -> str:
    return ", ".join(f"`{model_type}`" for model_type in types.split())


def table() -> str:
    """Return the families and the refusals in Markdown."""
    lines = [_INTRODUCTION, "| Family | Model type | Heads | Remarks |", "|---|---|---|---|"]
    for family in FAMILIES:
        lines.append(
            f"| {family.name} | `{family.model_type}` | {_heads(family)} | {family.note} |"
        )
    lines += ["", _IMAGES, "| Family with images | Model type | Remarks |", "|---|---|---|"]
    lines += [f"| {row.name} | `{row.model_type}` | {row.note} |" for row in VISION_FAMILIES]
    lines.append("")
    walked = walk.results()
    works, not_tiny = (_listed(walked[name]) for name in ("works", "not_tiny"))
    count = len(walked["works"].split())
    rolling = _listed(walked["without"]["rolling"])
    others = _OTHERS.format(
        transformers=walked["transformers"], count=count, rolling=rolling, works=works
    )
    lines += ["", others, "| Refused | Why |", "|---|---|"]
    lines += [f"| {_listed(types)} | {reason} |" for reason, types in walked["refused"].items()]
    if not_tiny:
        lines += ["", f"Not tried, as no tiny config could be made: {not_tiny}."]
    return "\n".join(lines) + "\n"


def document() -> str:
    """Return the text of docs/support-table.md."""
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
