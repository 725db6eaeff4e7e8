"""`show`: the catalogues; `figures`: the figures of the books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from shardwise import present
from shardwise.present import figures as books_figures
from shardwise.present.catalogue_names import CATALOGUES, names_of
from shardwise.present.verb import Argument, verb
from shardwise.values import InputError, Progress, argument_label, ignore_progress

if TYPE_CHECKING:
    from shardwise.present.catalogue_values import CatalogueEntries
    from shardwise.present.figures.figure import FigureSet


def _names_of_kind(command_words: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the catalogue that the first word is."""
    return names_of(command_words[0])


@verb(
    description="List what the catalogues have. With a name: every value of it with its source.",
    examples=(
        "shardwise show models qwen",
        "shardwise show chips h200",
        'shardwise show clusters "tpu-v5e:16x16*4" --json',
        "shardwise show stacks nemo-25 --chip h100",
        "shardwise show optimizers muon --precision bf16_bf16_moments",
    ),
    group_order=("catalogue", "output"),
)
def show(
    kind: Annotated[str, Argument(group="catalogue", choices=tuple(CATALOGUES), help="which catalogue")],
    name: Annotated[
        str | None,
        Argument(
            group="catalogue", optional=True, metavar="NAME", completes=_names_of_kind,
            help="one entry, or a part of the names of several; of clusters also a shorthand or the path of a .toml file",
        ),
    ] = None,
    chip: Annotated[
        str | None,
        Argument(
            flag="--chip", group="catalogue", metavar="NAME", completes="chips",
            help="of a stack: show the constants of this chip beside its own",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        Argument(
            flag="--precision", group="catalogue", metavar="NAME", completes="precisions",
            help="of optimizers: the recipe of their state (default: bf16)",
        ),
    ] = None,
    against_transformers: Annotated[
        str | None,
        Argument(
            flag="--against-transformers", group="catalogue", metavar="CONFIG",
            help="of models: compare a config.json's parameters with those of its model in transformers, if installed",
        ),
    ] = None,
) -> CatalogueEntries:  # fmt: skip
    """Return entries of a catalogue, each value with its source: one by name, those whose names contain a text, or all.

    With `against_transformers` it is the model of that config.json, with what `transformers` builds of it and the first
    parameter that differs. Raises `InputError` for an unknown name, and for an option beside another catalogue than its own.
    """

    if chip and kind != "stacks":
        raise InputError(
            f"{argument_label('chip')}: found without a stack; it goes with one, such as show stacks nemo-25 --chip h100"
        )
    if precision and kind != "optimizers":
        raise InputError(
            f"{argument_label('precision')}: found with {kind}; it goes with optimizers, such as show optimizers muon "
            "--precision fp32"
        )
    if against_transformers is not None:
        label = argument_label("against_transformers", "--against-transformers")
        if kind != "models" or name is not None:
            raise InputError(f"{label}: found with {name or kind}; it goes with models, and its config is the model")
        return present.compare_entry(against_transformers)
    return present.find_entries(kind, name, chip, precision)


@verb(
    description='Draw figures of "How to Scale Your Model" and of "The Ultra-Scale Playbook" from the functions that plans are '
    "made with, beside what the originals show. Without --out they are listed.",
    examples=(
        "shardwise figures",
        "shardwise figures strategies-16x16x16 --out strategies.svg",
        "shardwise figures zero-stages tp-scaling --out folder/",
    ),
    remark="With --out figures/ and no name all are drawn, with a page, figures/index.html.",
    group_order=("figures", "output"),
)
def figures(
    names: Annotated[
        Sequence[str],
        Argument(group="figures", metavar="NAME", variadic=True, optional=True, help="figures by name (default: all)"),
    ] = (),
    out: Annotated[
        str | None,
        Argument(
            flag="--out", group="output", metavar="PATH",
            help="a file for one figure, by its ending .svg, .png or .pdf; else a folder, for SVGs and a page",
        ),
    ] = None,
    progress: Progress = ignore_progress,
) -> FigureSet:  # fmt: skip
    """Return figures of the books by name, or all; with `out` they are drawn to a file, or to a folder with a page.

    Raises `InputError` for unknown names and for a place that cannot be written.
    """
    figure_set = books_figures.find_figures(names)
    return figure_set if out is None else books_figures.draw_figures(figure_set, out, progress)
