"""`roofline`, `rule` and `precision`: what bounds a kernel, the books' rules with the user's numbers, number formats."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack, overload

from shardwise import book_formulas, price
from shardwise.hardware import Chip
from shardwise.layout import Layout
from shardwise.model import Architecture, Job, load_model
from shardwise.present import charts, figures
from shardwise.present.arguments import JobFields, overrides_argument
from shardwise.present.exports import picture
from shardwise.present.verb import Argument, Mode, verb
from shardwise.values import (
    InputError,
    apply_overrides,
    argument_label,
    did_you_mean,
    parse_count,
    parse_overrides,
    raise_problems,
)
from shardwise.values.dtypes import FormatComparison, compare_formats

if TYPE_CHECKING:
    from shardwise.book_formulas import BlockRoofline, KernelComparison, KernelRoofline, NamedRule, Rule, RuleValue
    from shardwise.book_formulas.rooflines import Origin
    from shardwise.price import ClusterLike, ModelLike

KernelName = Literal["dot", "elementwise", "matmul", "bmm", "moe", "attention"]
MAX_SIZE = 10**18  # of any size: products of six of them stay finite
EXAMPLE_SIZES = "B=240,D=8192,F=28672"
# Words behind the sizes of a kernel of `--with`, and the option of the first kernel that each is.
ATTENTION_WORDS: Mapping[str, tuple[str, bool]] = {"causal": ("causal", True), "unfused": ("fused", False)}
# Letters of the kernels, for the help, which loads nothing; a test compares them with `book_formulas.rooflines.KERNEL_FORMS`.
KERNELS = """kernels and their sizes (in brackets: may be left out)
  dot          [N] · [N]                             N
  elementwise  A arrays [N] -> [N]                   N [A=2]
  matmul       [B, D] · [D, F]                       B,D,F
  bmm          [B, T, D] · [B, D, F]                 B,D,F [T=1]
  moe          [B, D] · [k of E experts, D, F]       B,D,F,E,k
  attention    Q [B, T, N, H], K and V [B, S, K, H]  T,N,H [B=1] [S=T] [K=N]; T=1 decodes
  MODEL        every operation of a model's block    T [B=1]: sequences of T tokens"""


def _roofline_chart(result: KernelComparison | BlockRoofline) -> charts.Chart:
    if isinstance(result, book_formulas.BlockRoofline):
        return figures.block_chart(result)
    return figures.kernels_chart(result)


@overload
def roofline(  # type: ignore[overload-overlap]  # sizes are letters, never `size_texts`
    kernel: KernelName, chip: str | Chip, *, dtype: str = ..., weights: str | None = ..., origin: Origin = ...,
    causal: bool = ..., fused: bool = ..., **sizes: int | str,
) -> KernelRoofline: ...  # fmt: skip
@overload
def roofline(
    kernel: Architecture, chip: str | Chip, *, dtype: str = ..., weights: str | None = ..., origin: Origin = ...,
    causal: bool = ..., fused: bool = ..., layout: str | Layout | None = ..., **sizes: int | str,
) -> BlockRoofline: ...  # fmt: skip
@overload
def roofline(  # type: ignore[overload-overlap]  # sizes are letters, never `size_texts`
    kernel: str, chip: str | Chip, *, dtype: str = ..., weights: str | None = ..., origin: Origin = ...,
    causal: bool = ..., fused: bool = ..., layout: str | Layout | None = ..., **sizes: int | str,
) -> KernelRoofline | BlockRoofline: ...  # fmt: skip
@overload
def roofline(
    kernel: str, chip: str | Chip, *, size_texts: Sequence[str], dtype: str = ..., weights: str | None = ...,
    origin: Origin = ..., causal: bool = ..., fused: bool = ..., compared_kernels: Sequence[str] = ...,
    layout: str | Layout | None = ..., overrides: Sequence[str] = ...,
) -> KernelComparison | BlockRoofline: ...  # fmt: skip
@verb(  # type: ignore[misc]  # keywords of sizes may be any but the parameters' names
    description=f"""What bounds a kernel on one chip: FLOPs, bytes moved, intensity against the chip's, time, the size from which
compute binds, what padding to the matrix unit wastes. Peaks and bandwidths are the vendor's, as in the books.

{KERNELS}""",
    examples=(
        "shardwise roofline matmul B=240,D=8192,F=28672 tpu-v5e --plot roofline.svg",
        "shardwise roofline matmul B=240,D=8192,F=28672 tpu-v5e --weights int8 --from vmem",
        'shardwise roofline attention T=8192,N=64,K=8,H=128 h100 --with "attention T=8192,N=64,K=8,H=128 unfused"',
        "shardwise roofline llama-3-70b T=8192 h100",
    ),
    exports=(picture("--plot", "draw the chip's rooflines with the kernels", _roofline_chart),),
    group_order=("kernel", "chip", "output"),
)
def roofline(
    kernel: Annotated[
        str | Architecture,
        Argument(group="kernel", metavar="KERNEL", completes="models", help="a kernel, or a model of the catalogue"),
    ],
    chip: Annotated[
        str | Chip,
        Argument(
            group="chip", metavar="CHIP", completes="chips", position=1,
            help="a chip of the catalogue, such as tpu-v5e, or a cluster's .toml file",
        ),
    ],
    *,
    size_texts: Annotated[
        Sequence[str],
        Argument(group="kernel", metavar="SIZES", variadic=True, help=f"its sizes by letter, such as {EXAMPLE_SIZES}"),
    ] = (),
    dtype: Annotated[
        str,
        Argument(
            flag="--dtype", group="kernel", metavar="NAME", help="format of activations and arithmetic (default: bf16)"
        ),
    ] = "bf16",
    weights: Annotated[
        str | None,
        Argument(
            flag="--weights", group="kernel", metavar="NAME",
            help="format that the weight of a product is stored in (default: that of --dtype)",
        ),
    ] = None,
    origin: Annotated[
        Origin,
        Argument(
            flag="--from", group="kernel", metavar="PLACE",
            help="where operands lie and results go: host (over PCIe), hbm (default) or vmem",
        ),
    ] = "hbm",
    causal: Annotated[
        bool, Argument(flag="--causal", group="kernel", help="mask attention (of the first kernel): queries see keys before them")
    ] = False,
    fused: Annotated[
        bool,
        Argument(
            flag="--unfused", group="kernel", switch_value=False,
            help="write attention's scores (of the first kernel) to memory, unlike flash attention",
        ),
    ] = True,
    compared_kernels: Annotated[
        Sequence[str],
        Argument(
            flag="--with", group="kernel", metavar="TEXT", repeat=True,
            help=f'another kernel with its sizes beside it, such as "matmul {EXAMPLE_SIZES}" or "attention T=4096,N=32,H=128 '
            'causal unfused"; may be repeated',
        ),
    ] = (),
    layout: Annotated[
        str | Layout | None,
        Argument(
            flag="--layout", group="kernel", metavar="TEXT", parse=str,
            help='of a model: the kernels of one device of a layout, such as "tp=8"',
        ),
    ] = None,
    overrides: Annotated[Sequence[str], overrides_argument("chip", "chip.pcie_bytes_per_s=15GB/s", group="chip")] = (),
    **sizes: int | str,
) -> KernelRoofline | KernelComparison | BlockRoofline:  # fmt: skip
    """Return the roofline of a kernel on a chip (FLOPs, bytes, intensity, seconds), or of every kernel of a model's block.

    Sizes are keywords by letter: "matmul" B, D, F; "attention" T, N, H and, if they differ, S, K; and so on (`shardwise roofline
    --help`). A model takes T, the tokens of a sequence, and B, the number of sequences (1); with a `layout`, the kernels are
    those of one device. `dtype` is the format of activations and arithmetic, `weights` that of a product's weight if it differs;
    `origin` is where operands lie ("hbm", "host", "vmem"); `causal` and `fused` apply to attention. Peaks and bandwidths are the
    vendor's. With `size_texts`, such as ["B=240,D=8192,F=28672"], kernels are compared with `compared_kernels`,
    each with its sizes and, of attention, the words "causal" and "unfused" for what `causal` and `fused` are of the first
    one (of all, if the first one is not attention).

    Raises `InputError` for an unknown kernel, letter, format or option, `MissingValueError` for a rate without a source. Source:
    "How to Scale Your Model", All About Rooflines.

    >>> import shardwise as sw
    >>> kernel = sw.roofline("matmul", "tpu-v5e", B=240, D=8192, F=28672)
    >>> kernel.bound, round(kernel.cost.intensity), round(kernel.critical_size)
    ('memory', 231, 253)
    >>> block = sw.roofline("llama-3-70b", "h100", T=8192)
    >>> block.num_seqs, block.operations[1].bound
    (1, 'compute')
    """
    changes = parse_overrides(overrides, ("chip",))
    loaded_chip, links = (chip, {}) if isinstance(chip, Chip) else book_formulas.load_chip_and_links(chip)
    loaded_chip = apply_overrides(loaded_chip, changes["chip"], "chip")
    counts = {letter: parse_count(size, label=f"SIZES: {letter}") for letter, size in sizes.items()}
    if not isinstance(kernel, str) or kernel not in book_formulas.KERNEL_FORMS:
        model = _load_kernel_model(kernel)
        counts |= parse_sizes(",".join(size_texts))
        kernel_options = {
            "dtype": dtype != "bf16", "weights": weights is not None, "origin": origin != "hbm", "causal": causal,
            "fused": not fused, "compared_kernels": bool(compared_kernels),
        }  # fmt: skip
        raise_problems([*_block_problems(counts), *_option_problems(kernel_options)])
        placed = Layout.parse(layout) if isinstance(layout, str) else layout
        num_seqs = counts.get("B", placed.micro_batch_seqs if placed else 1)
        return book_formulas.block_roofline(model, loaded_chip, num_seqs, counts["T"], placed, links)
    if layout is not None:
        raise InputError(f"{argument_label('layout')} is of a model's block; a kernel has its sizes")
    if not size_texts:
        return book_formulas.kernel_roofline(
            loaded_chip, kernel, counts, dtype, weights, origin=origin, causal=causal, fused=fused
        )
    options = {"dtype": dtype, "weights": weights, "origin": origin}
    texts = _kernel_texts(f"{kernel} {','.join(size_texts)}", compared_kernels, {"causal": causal, "fused": fused})
    rooflines = [
        _kernel_roofline(loaded_chip, text, {**options, **attention}, is_alone=len(texts) == 1)
        for text, attention in texts
    ]
    return book_formulas.KernelComparison(rooflines=tuple(rooflines), chip=loaded_chip, origin=origin, links=links)


def _kernel_texts(
    first: str, compared: Sequence[str], attention: Mapping[str, bool]
) -> list[tuple[str, Mapping[str, bool]]]:
    """Return kernels with their sizes, and the options of their attention: those given of the first one, and of the others the
    words behind their sizes. Where the first one is not attention, those given reach the others that are."""
    is_first = book_formulas.get_kernel_form(first.partition(" ")[0]).attention or not compared
    texts: list[tuple[str, Mapping[str, bool]]] = [(first, attention if is_first else {})]
    for text in compared:
        parts = text.split()
        reached = not is_first and book_formulas.get_kernel_form(parts[0]).attention
        named = dict(ATTENTION_WORDS[word] for word in parts if word in ATTENTION_WORDS)
        sizes = " ".join(word for word in parts if word not in ATTENTION_WORDS)
        texts.append((sizes, {**(attention if reached else {}), **named}))
    return texts


def _kernel_roofline(chip: Chip, text: str, options: Mapping[str, Any], *, is_alone: bool) -> KernelRoofline:
    """Return the roofline of a kernel's name with its sizes; of several kernels those with weights have their format."""
    name, _, sizes = text.strip().partition(" ")
    form = book_formulas.get_kernel_form(name)
    weights = options["weights"] if is_alone or form.weights else None
    return book_formulas.kernel_roofline(chip, name, parse_sizes(sizes), **{**options, "weights": weights})


def _load_kernel_model(kernel: str | Architecture) -> Architecture:
    if isinstance(kernel, Architecture):
        return kernel
    names = book_formulas.KERNEL_FORMS
    try:
        return load_model(os.fspath(kernel))
    except InputError as error:
        raise InputError(
            f"{argument_label('kernel')}: found {kernel!r}{did_you_mean(kernel, names)}; one of {', '.join(names)}, or a "
            "model is required",
            *error.problems,
        ) from None


def _block_problems(letters: Collection[str]) -> list[str]:
    """Return the problems of a block's sizes: unknown letters, or T missing."""
    problems = [
        f"SIZES: a block has no {letter!r}; T is required, B optional" for letter in letters if letter not in "BT"
    ]
    return problems + ([] if "T" in letters else ["SIZES: T missing; T is required, B optional, such as B=4,T=8192"])


def _option_problems(options: Mapping[str, bool]) -> list[str]:
    return [
        f"{argument_label(name)} is for a kernel; a model's block is bf16 from HBM, its attention causal and flash"
        for name, is_used in options.items()
        if is_used
    ]


def parse_sizes(text: str) -> dict[str, int]:
    """Parse sizes by letter, such as "B=240,D=8192". Raises `InputError` with everything that is wrong."""
    problems: list[str] = []
    sizes: dict[str, int] = {}
    for word in filter(None, re.split(r",\s*|\s+", text.strip())):
        letter, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not letter or letter in sizes:
            problems.append(
                f"SIZES: found {word!r}; LETTER=NUMBER, each letter once, is required, such as {EXAMPLE_SIZES}"
            )
            continue
        sizes[letter] = 1
        try:
            sizes[letter] = parse_count(value, label=f"SIZES: {letter}")
            if sizes[letter] > MAX_SIZE:
                problems.append(f"SIZES: {letter}: found {value!r}; at most {MAX_SIZE:.0e} is required")
        except InputError as error:
            problems += error.problems
    raise_problems(problems)
    return sizes


def _missing_rule_keys(command_words: Sequence[str]) -> list[str]:
    """Return the keys that the rule of a command line lacks, each with its sign of equality."""
    name, *key_values = command_words
    rule, keys = book_formulas.rules_by_name().get(name), {text.partition("=")[0] for text in key_values}
    return [f"{parameter.name}=" for parameter in rule.parameters if parameter.name not in keys] if rule else []


RuleName = Annotated[
    str, Argument(group="rule", metavar="NAME", completes="rules", help="a rule, as `shardwise show rules` names it")
]


def describe_rule(name: RuleName) -> NamedRule | RuleValue:
    """Return a rule by name: what it takes and gives; or its value at once if it takes nothing. Raises `InputError`."""
    named_rule = book_formulas.get_rule(name.strip())
    return named_rule if named_rule.parameters else book_formulas.evaluate_rule(named_rule, {})


@verb(
    description="Work out one of the books' rules: its value and unit, its formula and its source. The name alone says what the\n"
    "rule takes; `show rules` lists all.",
    examples=(
        "shardwise rule critical_intensity flops_per_s=459TFLOP/s bytes_per_s=180GB/s",
        "shardwise rule training_seconds num_params=70e9 tokens=15T num_chips=8960 flops_per_s=459TFLOP/s mfu=0.4",
        "shardwise rule params_by_part architecture=llama-3-70b --json",
        "shardwise rule tp_max_degree",
    ),
    modes=(Mode(function=describe_rule, applies=lambda arguments: "key_values" not in arguments),),
    group_order=("rule", "output"),
)
def rule(
    name: RuleName,
    *,
    key_values: Annotated[
        Sequence[str],
        Argument(
            group="rule", metavar="KEY=VALUE", variadic=True, optional=True, completes=_missing_rule_keys,
            help="what the rule takes, such as tokens=4Ki, bytes_per_s=3.2TB/s or memory_bytes=80GB; without one: say what it "
            "takes",
        ),
    ] = (),
    **values: Any,
) -> RuleValue:  # fmt: skip
    """Return one of the books' rules with your own numbers: its `value`, the `parts` of that with units, formula and source.

    A number is in the unit that the name of its key ends with; a text may have a unit, such as "4Ki", "3.2TB/s" or "80 GB"; a
    model is given by name. `key_values` are texts such as "tokens=4Ki" beside the keywords. Raises `InputError` for an unknown
    rule or key, a missing key, and a wrong value.

    >>> import shardwise as sw
    >>> alpha = sw.rule("critical_intensity", flops_per_s="459 TFLOP/s", bytes_per_s="180 GB/s")
    >>> alpha
    RuleValue: critical_intensity = 2,550 FLOPs/byte; (C / W) · (bytes per element / 2)
    >>> sw.rule("fsdp_min_tokens_per_chip", alpha=alpha.value, num_axes=3).value
    850.0
    """
    named_rule = book_formulas.get_rule(name.strip())
    return book_formulas.evaluate_rule(named_rule, {**parse_key_values(key_values), **values})


def parse_key_values(key_values: Sequence[str]) -> dict[str, str]:
    """Parse values by their keys. Raises `InputError` with every word that is no KEY=VALUE, and every key that is repeated.

    >>> parse_key_values(["alpha=2550", "num_axes=3"])
    {'alpha': '2550', 'num_axes': '3'}
    """
    pairs = [text.partition("=") for text in key_values]
    keys = [key.strip() for key, _, _ in pairs]
    incomplete = [text for text in key_values if not all(text.partition("="))]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    raise_problems([
        *(f"KEY=VALUE: found {text!r}; such as tokens=4Ki is required" for text in incomplete),
        *(f"KEY=VALUE: found {key} {keys.count(key)} times; once is required" for key in repeated),
    ])  # fmt: skip
    return {key: value.strip() for key, (_, _, value) in zip(keys, pairs, strict=True)}


@overload
def rules() -> tuple[NamedRule, ...]: ...
@overload
def rules(
    model: ModelLike, cluster: ClusterLike, job: Job | None = None, **fields: Unpack[JobFields]
) -> tuple[Rule, ...]: ...
def rules(
    model: ModelLike | None = None, cluster: ClusterLike | None = None, job: Job | None = None, **fields: Unpack[JobFields]
) -> tuple[Rule, ...] | tuple[NamedRule, ...]:  # fmt: skip
    """Return all of the books' rules, each with its parameters, formula and source; or those that bound a job on a cluster.

    For a job they are closed forms with their numbers and verdicts: critical intensity (FLOPs/byte), tokens per chip, the batch
    that FSDP needs, the largest degree of tensor parallelism that stays bound by compute, and the days of a run. A batch or
    sequence that is left out is the usual one of the model. Raises `InputError` for a model without a cluster, an unknown one,
    and a wrong job.

    >>> import shardwise as sw
    >>> next(rule for rule in sw.rules() if rule.name == "tp_max_degree")
    NamedRule: tp_max_degree alpha=... d_ff=... num_axes=1: M·F / alpha
    >>> of_job = sw.rules("llama-3-70b", "tpu-v5p:16x20x28", global_batch_tokens="4Mi", seq_len=4096)
    >>> by_name = {rule.name: rule for rule in of_job}
    >>> round(by_name["tokens_per_chip"].value), by_name["tokens_per_chip"].unit
    (468, 'tokens/chip')
    """
    if model is None and cluster is None and job is None and not fields:
        return tuple(book_formulas.rules_by_name().values())
    if model is None or cluster is None:
        raise InputError(
            "rules: found no model or no cluster; both are required, or none of them for the list of all rules"
        )
    inputs = price.resolve_problem(model, [cluster], job, fields)
    return book_formulas.book_rules(inputs.architecture, inputs.clusters[0], inputs.job)


def _format_charts(comparison: FormatComparison) -> tuple[charts.Chart, charts.Chart]:
    return charts.format_charts(comparison.formats)


@verb(
    description="Floating-point formats: bits, largest and smallest numbers, resolution. --plot draws the distance between\n"
    "numbers at every size, and 10,000 points between 1 and 2 rounded to each format. Recipes made of formats: show precisions.",
    examples=("shardwise precision", "shardwise precision bf16 fp16 e4m3 e5m2 --plot formats.svg"),
    exports=(picture("--plot", "draw range and resolution", _format_charts),),
    group_order=("formats", "output"),
)
def precision(
    formats: Annotated[
        Sequence[str],
        Argument(
            group="formats", metavar="FORMAT", variadic=True, optional=True,
            help="fp32, tf32, bf16, fp16, e4m3, e5m2, e2m1 or e8m0 (default: all)",
        ),
    ] = (),
) -> FormatComparison:  # fmt: skip
    """Return floating-point formats side by side: bits, largest and smallest numbers, resolution.

    `formats` are names such as "bf16"; without names all formats are returned. Raises `InputError` with every unknown name.

    >>> import shardwise as sw
    >>> [(number_format.name, number_format.max) for number_format in sw.precision(["e4m3", "e5m2"]).formats]
    [('e4m3', 448.0), ('e5m2', 57344.0)]
    """
    return compare_formats(formats)
