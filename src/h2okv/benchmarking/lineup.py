"""Which class stands behind which name of a cache."""

from __future__ import annotations

from h2okv.benchmarking.contestant import H2O, Contestant, Dynamic, Static
from h2okv.benchmarking.peer import Kvpress, Quantized
from h2okv.benchmarking.settings import CacheChoice

_CLASSES: dict[str, type[Contestant]] = {
    "dynamic": Dynamic,
    "static": Static,
    "quantized": Quantized,
    "h2o": H2O,
    "kvpress": Kvpress,
}


def contestant_class(choice: CacheChoice) -> type[Contestant]:
    """Returns the class behind a choice."""
    return _CLASSES[choice.name]
