"""`cheat-sheet`: rules and typical scales of the books on one printed page, computed for a model on a cluster."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Unpack

from shardwise import price
from shardwise.book_formulas import make_cheat_sheet
from shardwise.model import Job
from shardwise.present import charts
from shardwise.present.arguments import USUAL_JOB, ClusterName, JobFields, Model
from shardwise.present.exports import ending_of, write_file
from shardwise.present.verb import Export, verb

if TYPE_CHECKING:
    from shardwise.book_formulas import CheatSheet

USUAL_TOKENS = 15e12  # of a run; source: Llama 3 report (arXiv 2407.21783), 15.6T tokens


def _sheet_name(text: str) -> str:
    """Return the name of a sheet. Raises `ArgumentTypeError` for an ending that no sheet has."""
    if ending_of(text) not in (".html", ".svg"):
        raise argparse.ArgumentTypeError(f"found {text!r}; a name that ends in .html or .svg is required")
    return text


def _write_for_paper(name: str) -> Export:
    """Return `--a4` or `--letter`: the sheet as a page of that paper, HTML or SVG by the file's ending."""
    flag = f"--{name}"

    def write(sheet: CheatSheet, target: str) -> None:
        paper = charts.PAPERS[name]
        is_html = ending_of(target) == ".html"
        write_file(
            flag, target, charts.sheet_html(sheet, paper) if is_html else charts.sheet_drawing(sheet, paper).svg()
        )

    return Export(
        flag=flag, help=f"write the sheet as one page of {charts.PAPERS[name].css}, as .html or .svg", parse=_sheet_name,
        write=write,
    )  # fmt: skip


@verb(
    description="Rules and typical scales of the books for a model on a cluster, each number computed: one page to print.",
    defaults={**USUAL_JOB, "tokens": "15T"},
    examples=(
        "shardwise cheat-sheet llama-3-70b h100:512 --a4 sheet.html",
        "shardwise cheat-sheet deepseek-v3 gb200:576 --letter sheet.svg --tokens 14.8T",
    ),
    exports=(_write_for_paper("a4"), _write_for_paper("letter")),
    group_order=("job", "cluster", "output"),
)
def cheat_sheet(model: Model, cluster: ClusterName, job: Job | None = None, **fields: Unpack[JobFields]) -> CheatSheet:
    """Return the books' rules and typical scales for a model, a cluster and a job, each with its formula and source.

    Peaks and rates are nominal; a batch and a sequence that are left out are usual for the model, a run has 15T tokens. Raises
    `InputError` for an unknown model or cluster and a wrong job, `MissingValueError` for a peak without a source.

    >>> import shardwise as sw
    >>> sheet = sw.cheat_sheet("llama-3-8b", "tpu-v5p:4x4x4")
    >>> rule = next(item for section in sheet.sections for item in section.items if item.name == "fsdp min tokens per chip")
    >>> rule.text
    '850 tokens/chip'
    """
    inputs = price.resolve_problem(model, [cluster], job, fields, assume_stack=False)
    tokens = USUAL_TOKENS if inputs.job.tokens is None else inputs.job.tokens
    return make_cheat_sheet(inputs.architecture, inputs.clusters[0], inputs.job, tokens)
