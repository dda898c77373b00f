"""Trains the byte-level BPE tokenizer of the bundled model.

Example:
    python -m training.tokenizer --text ../shared/data/text --out run/tokenizer
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from training.text import SEPARATOR, read_training_books

BOS = "<|bos|>"
EOS = SEPARATOR


def train_tokenizer(books: list[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose `encode` puts BOS first.

    Args:
        books: The text to learn the merges from.
        vocab_size: Number of entries, BOS and EOS among them.

    Returns:
        A fast tokenizer, ready for `save_pretrained`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(books, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="folder with books_train.txt.xz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer")
    parser.add_argument("--vocab-size", type=int, default=4096, help="entries (default 4096)")
    args = parser.parse_args()
    books = read_training_books(args.text)
    tokenizer = train_tokenizer(books, args.vocab_size)
    tokenizer.save_pretrained(args.out)
    sample = books[0][:20_000]
    ratio = len(sample) / len(tokenizer.encode(sample, add_special_tokens=False))
    print(f"{len(tokenizer)} entries, {ratio:.2f} characters per token, written to {args.out}")


if __name__ == "__main__":
    main()
