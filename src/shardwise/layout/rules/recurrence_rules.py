"""Rules of recurrences and of compressed keys for a layout: which dims of them can be split, and how a sequence may be."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.layout.layout import cp_variant_names, get_cp_variant
from shardwise.layout.rules.layout_rule import LayoutRule, RuleContext
from shardwise.model import Architecture
from shardwise.model.recurrent_mixers import RecurrentMixer
from shardwise.values import Value

# What contiguous segments hand to the next one: with a recurrence, and with compressed keys alone.
SEGMENTED_PARTS: Mapping[bool, str] = {True: "states of recurrences", False: "windows of compressed keys"}
CONTIGUOUS_VARIANTS = tuple(name for name in cp_variant_names() if get_cp_variant(name).sequence_pieces == 1)
# What tensor parallelism splits of a recurrence, by kind (`model.recurrent_mixers`, dim L).
SPLIT_PARTS: Mapping[str, str] = {
    "gated_delta": "heads of keys", "kimi_delta": "heads", "mamba1": "channels", "rg_lru": "blocks of channels",
    "short_conv": "channels",
}  # fmt: skip


def _recurrences(architecture: Architecture) -> tuple[RecurrentMixer, ...]:
    mixers = (layer.recurrence for layer in architecture.layer_architectures.values())
    return tuple(dict.fromkeys(mixer for mixer in mixers if mixer is not None))


def describe_split_parts(mixer: RecurrentMixer) -> str:
    """Return what tensor parallelism splits of a recurrence, with their number.

    >>> describe_split_parts(RecurrentMixer(kind="mamba2", num_heads=32, num_groups=2, key_dim=256, head_dim=128, conv_width=4))
    'the 2 groups of heads of mamba2'
    """
    part = SPLIT_PARTS.get(mixer.kind) or ("groups of heads" if mixer.structure.has_groups else "heads")
    part = f"groups of {part}" if mixer.kind == "mamba1" and mixer.structure.has_groups else part
    return f"the {mixer.dims['L']} {part} of {mixer.kind}"


def _tp_divides_recurrences(c: RuleContext) -> Value:
    legal: Value = True
    for mixer in _recurrences(c.model):
        legal = legal & (mixer.dims["L"] % c["tp"] == 0)
    return legal


def _explain_tp(c: RuleContext) -> str:
    mixers = _recurrences(c.model)
    legal = (n for n in range(1, mixers[0].dims["L"] + 1) if all(mixer.dims["L"] % n == 0 for mixer in mixers))
    parts = " and ".join(describe_split_parts(mixer) for mixer in mixers)
    return (
        f"tp = {c['tp']} does not split {parts} evenly, and a state's rows and columns are not split; tp may be one of "
        f"{', '.join(map(str, legal))}"
    )


def _is_contiguous(c: RuleContext) -> Value:
    return cp_variant_names()[c["cp_variant"]] in CONTIGUOUS_VARIANTS


def _compress_windows(architecture: Architecture) -> tuple[int, ...]:
    """Return the tokens of a compressed key, of layers that have some."""
    windows = (layer.compress_window for layer in architecture.layer_architectures.values())
    return tuple(dict.fromkeys(filter(None, windows)))


def _has_segments(c: RuleContext) -> bool:
    """Return whether segments of the sequence hand something to the next: states, or windows of tokens."""
    return bool(_recurrences(c.model) or _compress_windows(c.model))


def _windows_fit_segments(c: RuleContext) -> Value:
    legal: Value = True
    for window in _compress_windows(c.model):
        legal = legal & (c.job.seq_len % (c["cp"] * window) == 0)
    return legal


def _explain_windows(c: RuleContext) -> str:
    windows, seq_len = _compress_windows(c.model), c.job.seq_len
    legal = (cp for cp in range(1, seq_len + 1) if all(seq_len % (cp * window) == 0 for window in windows))
    return (
        f"a segment of {seq_len:,} / cp = {seq_len // c['cp']} tokens is not a multiple of the windows of "
        f"{' and '.join(map(str, windows))} tokens, which are one compressed key each; cp may be one of "
        f"{', '.join(map(str, legal)) or '1'}"
    )


def _rows_fit_segments(c: RuleContext) -> Value:
    rows = max((mixer.dims["w"] for mixer in _recurrences(c.model)), default=0)
    return True if not rows else c.job.seq_len // c["cp"] >= rows


RECURRENCE_RULES: tuple[LayoutRule, ...] = (
    LayoutRule("recurrence_by_tp", "model", ("tp",), _tp_divides_recurrences, _explain_tp),
    LayoutRule(
        "recurrence_by_cp", "model", ("cp_variant", "cp"),
        lambda c: (c["cp"] == 1) | (not _has_segments(c)) | _is_contiguous(c),
        lambda c: (
            f"{c.model.name} has {SEGMENTED_PARTS[bool(_recurrences(c.model))]}, which pass from one contiguous segment of the "
            "sequence to the next; "
            f"{cp_variant_names()[c['cp_variant']]} gives each of cp = {c['cp']} ranks two pieces, one from either end; "
            f"cp_variant={CONTIGUOUS_VARIANTS[0]} or cp=1 is required"
        ),
        reads_mode=True,
    ),
    LayoutRule(
        "windows_by_cp", "model", ("cp",),
        lambda c: (c["cp"] == 1) | _windows_fit_segments(c),
        _explain_windows,
    ),
    LayoutRule(
        "convolution_by_cp", "model", ("cp",),
        lambda c: (c["cp"] == 1) | _rows_fit_segments(c),
        lambda c: (
            f"a segment of {c.job.seq_len:,} / cp = {c.job.seq_len // c['cp']} tokens is shorter than the "
            f"{max(mixer.dims['w'] for mixer in _recurrences(c.model))} rows before a token that a short convolution reads; "
            "a smaller cp is required"
        ),
    ),
)  # fmt: skip
