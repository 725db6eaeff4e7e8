"""Passes of inference on sharded devices give, token by token, the logits of `transformers`' `generate` in double precision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from crosscheck.served_models import (
    NUM_NEW,
    PROMPTS,
    decode,
    generated,
    lay_out_tokens,
    logits_by_sequence,
    place_sequences,
    prefill,
    serve,
    whole_prompts,
)

from shardwise.derive.inference_unit import derive_inference_unit
from shardwise.run.numpy.inference import ServedModel
from shardwise.serve.speculative_decoding import expected_tokens
from shardwise.values import SymbolValues

TOLERANCE = 1e-11  # of the largest logit
POSITIONS = {index: len(prompt) for index, prompt in enumerate(PROMPTS)}


def assert_generated(name: str, logits: Mapping[int, Any]) -> None:
    expected = generated(name)
    for sequence, rows in logits.items():
        assert tuple(np.argmax(rows, axis=-1)) == expected.tokens[sequence]
        scale = np.abs(expected.logits[sequence]).max()
        assert np.abs(rows - expected.logits[sequence]).max() <= TOLERANCE * scale


FORMS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("llama", {}, {"num_rows": 1}),
    ("llama", {}, {"num_rows": 4}),
    ("llama", {"kv_m": 2}, {"num_rows": 1}),
    ("llama", {"kv_m": 2, "rep_m": 2}, {"num_rows": 2}),
    ("llama", {"kv_m": 2, "rep_m": 4}, {"num_rows": 1}),
    ("llama", {"kv_m": 2, "rep_m": 2}, {"num_rows": 4, "batch_in_attention": True}),
    ("llama", {"kv_m": 2, "rep_m": 4}, {"num_rows": 4, "batch_in_attention": True}),
    ("llama", {"kv_m": 2, "ws": 2}, {"num_rows": 2, "splits_width": True}),
    ("llama", {"kv_m": 2, "rep_m": 2, "ws": 2}, {"num_rows": 1, "splits_width": True}),
    ("llama", {"kv_m": 2}, {"num_rows": 1, "num_stages": 2}),
    ("llama", {"dp_m": 2, "kv_m": 2}, {"num_rows": 2}),
    ("qwen3_moe", {}, {"num_rows": 1}),
    ("qwen3_moe", {"kv_m": 4}, {"num_rows": 1}),
    ("qwen3_moe", {"kv_e": 4}, {"num_rows": 1}),
    ("qwen3_moe", {"kv_e": 2, "kv_m": 2, "rep_m": 2}, {"num_rows": 2}),
    ("qwen3_moe", {"dp_e": 4}, {"num_rows": 4}),
    ("qwen3_moe", {"dp_m": 4}, {"num_rows": 4}),
    ("qwen3_moe", {"dp_e": 4}, {"num_rows": 4, "dispatch": "all_to_all"}),
    ("qwen3_moe", {"dp_e": 2, "kv_e": 2}, {"num_rows": 4, "dispatch": "all_to_all", "token_dim": "B"}),
    ("qwen3_moe", {"dp_e": 2, "kv_e": 2, "rep_e": 2}, {"num_rows": 8 // 2, "dispatch": "all_gather"}),
    ("qwen3_moe", {"dp_e": 2, "kv_m": 2}, {"num_rows": 4, "dispatch": "all_to_all", "token_dim": "B"}),
    ("qwen3_moe", {"dp_m": 2, "dp_e": 2}, {"num_rows": 4, "dispatch": "all_to_all", "token_dim": "B"}),
    ("qwen3_moe", {"dp_e": 2, "kv_m": 2}, {"num_rows": 2, "num_stages": 2}),
    ("qwen3_moe", {"kv_m": 4, "rep_m": 2}, {"num_rows": 4, "batch_in_attention": True}),
    ("qwen3_moe", {"kv_m": 2, "ws": 2}, {"num_rows": 1, "splits_width": True}),
    ("deepseek_v3", {}, {"num_rows": 1}),
    ("deepseek_v3", {"kv_m": 4}, {"num_rows": 2}),
    ("deepseek_v3", {"kv_e": 4}, {"num_rows": 1}),
    ("deepseek_v3", {"dp_e": 4, "kv_e": 2}, {"num_rows": 4}),
    ("deepseek_v3", {"dp_e": 4}, {"num_rows": 4, "dispatch": "all_to_all"}),
    ("deepseek_v3", {"dp_e": 2, "kv_e": 2}, {"num_rows": 4, "dispatch": "all_to_all", "token_dim": "B"}),
    ("deepseek_v3", {"kv_m": 2}, {"num_rows": 1, "num_stages": 2}),
    ("deepseek_v3", {"kv_m": 4}, {"num_rows": 4, "batch_in_attention": True}),
    ("deepseek_v3", {"kv_m": 2, "ws": 2}, {"num_rows": 2, "splits_width": True}),
    ("mistral", {"kv_m": 2}, {"num_rows": 2}),
    ("gpt_oss", {"kv_m": 2, "rep_m": 2}, {"num_rows": 1}),
    ("gpt_oss", {"dp_e": 2, "kv_e": 2}, {"num_rows": 2}),
]  # fmt: skip


def describe(form: tuple[str, dict[str, int], dict[str, Any]]) -> str:
    name, degrees, choices = form
    return "-".join([name, *(f"{key}{value}" for key, value in (degrees | choices).items())])


@pytest.mark.parametrize(("name", "degrees", "choices"), FORMS, ids=map(describe, FORMS))
def test_prefill_and_decode_give_the_tokens_of_generate(
    name: str, degrees: dict[str, int], choices: dict[str, Any]
) -> None:
    served = serve(name, degrees, **choices)
    logits = prefill(served, whole_prompts())
    assert_generated(name, decode(served, logits, NUM_NEW - 1, POSITIONS))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "mistral"])
def test_chunks_and_mixed_batches_equal_whole_prefills(name: str) -> None:
    """Sequence 0 is prefilled in chunks; the others decode meanwhile, in the same passes and the same row."""
    degrees = {"kv_m": 2}
    whole = serve(name, degrees, num_rows=1)
    expected = decode(whole, prefill(whole, whole_prompts()), NUM_NEW - 1, POSITIONS)

    mixed = serve(name, degrees, num_rows=1)
    rows = {sequence: [row] for sequence, row in prefill(mixed, whole_prompts()[1:]).items()}
    for step, (first, end) in enumerate([(0, 3), (3, 4), (4, 7)]):
        chunks: list[tuple[int, Any, int]] = [(0, PROMPTS[0][first:end], first)]
        chunks += [(s, [int(np.argmax(decoded[-1]))], POSITIONS[s] + step) for s, decoded in rows.items() if s]
        for sequence, row in run_chunks(mixed, chunks).items():
            rows.setdefault(sequence, []).append(row)
    assert np.abs(rows[0][-1] - expected[0][0]).max() <= TOLERANCE
    for sequence in (1, 2, 3):
        assert np.abs(np.stack(rows[sequence]) - expected[sequence][:4]).max() <= TOLERANCE


def run_chunks(served: ServedModel, chunks: list[tuple[int, Any, int]]) -> dict[int, Any]:
    tokens = lay_out_tokens(chunks, served.num_rows, place_sequences(served.num_rows))
    return logits_by_sequence(served, tokens, [sequence for sequence, _, _ in chunks], absorbs=False)


MOVING = [form for form in FORMS if form[1] and "num_stages" not in form[2]]


@pytest.mark.parametrize(("name", "degrees", "choices"), MOVING, ids=map(describe, MOVING))
def test_a_pass_moves_what_its_derivation_says(name: str, degrees: dict[str, int], choices: dict[str, Any]) -> None:
    served = serve(name, degrees, **choices)
    prefill(served, whole_prompts())
    assert served.moved == derived_traffic(served, longest_row(served))


def longest_row(served: ServedModel) -> tuple[int, int]:
    """Return the tokens of the longest row of a pass with all prompts, and the most picked tokens of a row."""
    places = place_sequences(served.num_rows)
    rows = [[len(p) for s, p in enumerate(PROMPTS) if places[s][0] == row] for row in range(served.num_rows)]
    return max(map(sum, rows)), max(map(len, rows))


def derived_traffic(served: ServedModel, tokens: tuple[int, int]) -> Mapping[Any, int]:
    """Return the elements that all devices receive in a pass by the derivation, by kind and axes of the collective."""
    moved: Counter[Any] = Counter()
    sizes = {"B": served.num_rows, "T": tokens[0], "Z": served.num_slots, "j": tokens[1]}
    for unit in ("embedding", *served.layers, "head"):
        dims = served.architecture.unit_architecture(unit).dims
        values = SymbolValues({**dims, **sizes, **dict(served.mesh.axes)})
        for step in derive_inference_unit(served.scheme, unit).forward.communication:
            received = step.collective.received_elements.evaluate(values) * served.mesh.num_devices
            moved[step.collective.kind, step.collective.axes] += round(received)
    return +moved


def test_queries_at_the_latents_equal_keys_made_of_them() -> None:
    expanded, absorbed = (
        prefill(serve("deepseek_v3", {"kv_m": 2}, num_rows=2), whole_prompts(), absorbs=absorbs)
        for absorbs in (False, True)
    )
    for sequence, row in expanded.items():
        assert np.abs(row - absorbed[sequence]).max() <= TOLERANCE


def test_context_parallel_prefill_equals_generate() -> None:
    for name in ("llama", "deepseek_v3"):
        served = serve(name, {"cp": 2, "kv_m": 2}, num_rows=4)
        first = prefill(served, [(0, 0, 6), (1, 0, 3), (2, 0, 5), (3, 0, 4)])  # rows of 6 tokens: 3 on each device
        expected = generated(name).logits
        for sequence in (1, 2, 3):
            scale = np.abs(expected[sequence][0]).max()
            assert np.abs(first[sequence] - expected[sequence][0]).max() <= TOLERANCE * scale


DRAFTED = 2


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_verified_drafts_give_the_tokens_of_generate_in_fewer_passes(name: str, acceptance: float) -> None:
    """A pass computes the last token and two drafted ones; what is rejected is overwritten in the cache by the next pass."""
    served, expected, rng = serve(name, {"kv_m": 2}, num_rows=2), generated(name), np.random.default_rng(0)
    texts = {s: [int(np.argmax(row))] for s, row in prefill(served, whole_prompts()).items()}
    passes, accepted = 0, 0
    while min(map(len, texts.values())) < NUM_NEW:
        drafts = {s: draft_tokens(expected.tokens[s], len(text), acceptance, rng) for s, text in texts.items()}
        chunks = [(s, [text[-1], *drafts[s]], POSITIONS[s] + len(text) - 1) for s, text in texts.items()]
        tokens = lay_out_tokens(chunks, served.num_rows, place_sequences(served.num_rows), num_picked=1 + DRAFTED)
        logits = served.run(tokens, absorbs_latent=True).reshape(len(PROMPTS), 1 + DRAFTED, -1)
        for s, text in texts.items():
            chosen = np.argmax(logits[s], axis=-1).tolist()
            count = next((i for i, token in enumerate(drafts[s]) if token != chosen[i]), DRAFTED)
            text += chosen[: count + 1]
            accepted += count
        passes += 1
    for s, text in texts.items():
        assert tuple(text[:NUM_NEW]) == expected.tokens[s]
    if acceptance in (0.0, 1.0):
        assert passes == math.ceil((NUM_NEW - 1) / expected_tokens(acceptance, DRAFTED))
    assert bool(accepted) == bool(acceptance)


def draft_tokens(text: tuple[int, ...], start: int, acceptance: float, rng: np.random.Generator) -> list[int]:
    """Return drafts of the tokens from `start` on, each right with this probability; behind the end any token is."""
    following = [*text[start : start + DRAFTED], *[0] * DRAFTED][:DRAFTED]
    return [token if rng.random() < acceptance else (token + 1) % 32 for token in following]
