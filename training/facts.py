"""Facts: who, which property, which answer, and the sentences that state and use them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from training import words

HELD_OUT_SHARE = 8  # one pair of name and answer in eight is never seen in training

# Every sentence names the property and the person before the answer, so the answer is known from
# an earlier statement and from nothing else. {r} property, {n} name, {a} answer.
STATEMENTS = (
    "The {r} of {n} is {a}.",
    "The {r} of {n} was {a}.",
    "{n}'s {r} is {a}.",
    "{n}'s {r} was {a}.",
    "Let it be remembered that the {r} of {n} is {a}.",
    "You must know that the {r} of {n} was {a}.",
    "Now the {r} of {n}, as all the world could tell, was {a}.",
    "As for {n}, the {r} was {a}.",
    "In those days the {r} of {n} was {a}, and nobody wondered at it.",  # word-ok
)
USES = (
    "The {r} of {n} is {a}.",
    "The {r} of {n} was {a}.",
    "{n}'s {r} is {a}.",
    "{n}'s {r} was {a}, as before.",
    "And the {r} of {n} was still {a}.",
    "They spoke again of {n}, whose {r} was {a}, and were silent.",
    "It was said once more that the {r} of {n} was {a}.",
    "He thought of {n} and of the {r}, which was {a}.",
    "She had not forgotten that {n}'s {r} was {a}.",
    'Somebody called out, "The {r} of {n} is {a}!"',
    "For {n} there could be no other {r} than {a}.",
    "Nothing was dearer to {n} than the {r}, {a}.",
)
QUESTIONS = (
    "What is the {r} of {n}? It is {a}.",
    '"What is the {r} of {n}?" "It is {a}."',
    '"Tell me the {r} of {n}." "Why, it is {a}," was the answer.',
    '"And {n}\'s {r}?" said he. "It is {a}," said she.',
    "Do you remember the {r} of {n}? It was {a}.",
    "If anyone should ask for the {r} of {n}, say that it is {a}.",
)
KINDS = {"statement": STATEMENTS, "use": USES, "question": QUESTIONS}

ANSWERS = {
    "city": words.CITIES,
    "birthplace": words.CITIES,
    "trade": words.TRADES,
    "rival": words.GIVEN_NAMES,
    "friend": words.GIVEN_NAMES,
    "favourite animal": words.ANIMALS,
    "emblem": words.ANIMALS,
    "favourite tree": words.PLANTS,
    "flower": words.PLANTS,
    "instrument": words.INSTRUMENTS,
    "colour": words.COLOURS,
    "supper": words.DISHES,
    "treasure": words.TREASURES,
    "gift": words.TREASURES,
    "secret word": None,
    "house": None,
}
PROPERTIES = tuple(ANSWERS)


@dataclass(frozen=True)
class Fact:
    """One fact: the `relation` of `name` is `answer`."""

    name: str
    relation: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether this pair of name and answer is kept for the evaluation."""
        digest = hashlib.blake2b(f"{self.name}|{self.answer}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0

    def sentence(self, template: str) -> tuple[str, str, str]:
        """Fill a template.

        Args:
            template: A sentence of `STATEMENTS`, `USES` or `QUESTIONS`.

        Returns:
            The text before the answer, the answer with its leading space or quote, the rest.
        """
        head, tail = template.split("{a}")
        head = head.format(r=self.relation, n=self.name)
        space = " " if head.endswith(" ") else ""
        tail = tail.format(r=self.relation, n=self.name)
        return head.removesuffix(" "), space + self.answer, tail


def invented_word(rng: np.random.Generator) -> str:
    """Make a word that no book holds, such as "Trondale".

    Args:
        rng: Where chance comes from.

    Returns:
        A capitalised word.
    """
    syllables = [
        rng.choice(words.ONSETS) + rng.choice(words.NUCLEI) + rng.choice(words.CODAS)
        for _ in range(rng.integers(1, 3))
    ]
    return ("".join(syllables) + rng.choice(words.ENDINGS)).capitalize()


def draw_name(rng: np.random.Generator) -> str:
    """Draw whom a fact is about: mostly a given name, else an invented one."""
    return invented_word(rng) if rng.random() < 0.2 else str(rng.choice(words.GIVEN_NAMES))


def draw_facts(
    rng: np.random.Generator, count: int, held_out: bool, one_property: bool = False
) -> list[Fact]:
    """Draw facts that only the full question distinguishes.

    Names and properties repeat among the facts, but no two facts have both in common.

    Args:
        rng: Where chance comes from.
        count: Number of facts.
        held_out: Whether to draw pairs of name and answer that training never shows.
        one_property: Whether all facts are about one property, so that only the name tells.

    Returns:
        `count` facts.
    """
    names = [draw_name(rng) for _ in range(max(1, count - int(rng.integers(0, 2))))]
    relations = [str(rng.choice(PROPERTIES)) for _ in range(max(1, count // 2 + 1))]
    if one_property:
        relations = relations[:1]
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < count:
        name = str(rng.choice(names)) if rng.random() < 0.7 else draw_name(rng)
        relation = str(
            rng.choice(PROPERTIES if rng.random() >= 0.7 and not one_property else relations)
        )
        pool = ANSWERS[relation]
        answer = invented_word(rng) if pool is None else str(rng.choice(pool))
        fact = Fact(name, relation, answer)
        if fact.held_out == held_out and answer != name:
            facts.setdefault((name, relation), fact)
    return list(facts.values())
