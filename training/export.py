"""Writes the checkpoint of a run as a folder that transformers loads, in bf16.

Works while the run goes on: the folder is written aside and then put in place.

Example:
    python -m training.export --run run/books --tokenizer run/tokenizer \
        --out src/h2okv/assets/books-llama
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training import checkpoint, model

CARD = "CARD.md"


def load_model(
    run: Path, tokenizer: PreTrainedTokenizerFast
) -> tuple[LlamaForCausalLM, checkpoint.Progress]:
    """Build the model of a run with the weights of its last checkpoint.

    Args:
        run: The folder of the run.
        tokenizer: The tokenizer that it is trained with.

    Returns:
        The model in bf16, and how far the run is.
    """
    progress, states = checkpoint.load(run)
    layers = 1 + max(
        int(name.split(".")[2]) for name in states["model"] if name.startswith("model.layers.")
    )
    config = model.build_config(tokenizer, layers)
    config.dtype = torch.bfloat16
    net = LlamaForCausalLM(config)
    net.load_state_dict(states["model"])
    net.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return net.to(torch.bfloat16).eval(), progress


def export(run: Path, tokenizer: PreTrainedTokenizerFast, out: Path) -> checkpoint.Progress:
    """Write the model folder and puts it in place; a card that is there stays.

    Args:
        run: The folder of the run.
        tokenizer: The tokenizer that it is trained with.
        out: The folder to write.

    Returns:
        How far the run was.
    """
    net, progress = load_model(run, tokenizer)
    tokenizer.model_max_length = net.config.max_position_embeddings
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as aside:
        fresh, old = Path(aside, "new"), Path(aside, "old")
        net.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for file in fresh.iterdir():
            file.chmod(0o644)  # the weights are written readable by their owner alone
        if (out / CARD).exists():
            shutil.copy2(out / CARD, fresh / CARD)
        if out.exists():
            out.rename(old)
        fresh.rename(out)
    return progress


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of its tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    progress = export(args.run, tokenizer, args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir()) / 1e6
    Console().print(f"step {progress.step}, {progress.tokens:,} tokens, {size:.1f} MB: {args.out}")


if __name__ == "__main__":
    main()
