"""Catalogues by the word that `shardwise show` takes, with the names of their entries; shells complete values with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise import book_formulas, hardware, interop, model, values

# A function for each, so that the rooms load when their names are asked for.
CATALOGUES: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "models": lambda: model.model_names(),
    "chips": lambda: hardware.chip_names(),
    "clusters": lambda: hardware.cluster_examples(),
    "precisions": lambda: tuple(values.PRECISIONS),
    "stacks": lambda: hardware.stack_names(),
    "targets": lambda: tuple(interop.TARGETS),
    "rules": lambda: tuple(book_formulas.rules_by_name()),
    "optimizers": lambda: model.optimizer_names(),
}


def names_of(catalogue: str) -> tuple[str, ...]:
    """Return the names of a catalogue's entries; none for a word that is no catalogue.

    >>> names_of("chips")[:2], names_of("files")
    (('mi250x', 'mi300x'), ())
    """
    return CATALOGUES[catalogue]() if catalogue in CATALOGUES else ()
