import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT.parent / "shared" / "data" / "text"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # training/ is not part of the installed package


@pytest.fixture(scope="session")
def held_out_book() -> str:
    path = TEXT / "alice_in_wonderland.txt"
    if not path.exists():
        pytest.skip(f"no {path.name} in ../shared/data/text")
    from training.text import read_held_out_book

    return read_held_out_book(TEXT, path.name)


@pytest.fixture(scope="session")
def tokenizer(held_out_book):
    from training.tokenizer import train_tokenizer

    return train_tokenizer([held_out_book], vocab_size=1024)


@pytest.fixture(scope="session")
def corpus(held_out_book, tokenizer):
    from training.data import Corpus

    return Corpus.from_books([held_out_book], tokenizer)
