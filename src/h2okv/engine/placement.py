"""Where each part of the model is: on the device, in the CPU's memory, or on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Place = Literal["device", "cpu", "disk"]
PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class Placement:
    """Where weights are.

    Attributes:
        units: For every unit in the order of a forward (layers, then the head).
        table: Of the input embedding; on the ``"disk"`` only its rows in use are read.
    """

    units: tuple[Place, ...]
    table: Place

    def indices(self, place: Place) -> list[int]:
        """The units at a place."""
        return [index for index, own in enumerate(self.units) if own == place]


def parse_shares(option: str, text: str, places: tuple[str, ...]) -> dict[str, float] | None:
    """Reads where something goes.

    Args:
        option: The option's name, for the message.
        text: ``auto``, one place, or percentages such as ``device=40,disk=60``.
        places: The places there are.

    Returns:
        Shares that add up to 1, by place; ``None`` for ``auto``.

    Raises:
        ValueError: If it is none of these.
    """
    if text == "auto":
        return None
    if text in places:
        return {text: 1.0}
    shares: dict[str, float] = {}
    for part in text.split(","):
        place, _, number = part.strip().partition("=")
        try:
            share = float(number.removesuffix("%"))
        except ValueError:
            share = -1.0
        if place not in places or place in shares or not 0 <= share <= 100:
            raise ValueError(
                f"--{option} {text!r} is no place; give auto, {', '.join(places)}, or percentages"
                f" such as {places[0]}=40,{places[-1]}=60"
            )
        shares[place] = share / 100
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(
            f"--{option} {text!r} adds up to {100 * sum(shares.values()):g} percent; give 100"
        )
    return shares


def spread(shares: dict[str, float], count: int) -> list[str]:
    """Deals places out evenly, so that reading and computing take turns.

    Args:
        shares: By place, adding up to 1.
        count: Of what gets a place.

    Returns:
        As many places.
    """
    dealt = dict.fromkeys(shares, 0)
    order = []
    for number in range(1, count + 1):
        # Whoever is furthest behind its share is next.
        place = max(shares, key=lambda own: shares[own] * number - dealt[own])
        dealt[place] += 1
        order.append(place)
    return order


def place_by_shares(shares: dict[str, float], count: int) -> Placement:
    """Places units by percentages.

    Args:
        shares: By place.
        count: Units, the head among them.

    Returns:
        The placement; the input embedding is where the head is.
    """
    units: list[Place] = [_as_place(own) for own in spread(shares, count)]
    return Placement(tuple(units), units[-1] if units[-1] != "cpu" else "device")


def _as_place(text: str) -> Place:
    return next(place for place in PLACES if place == text)
