"""Batch and sequence that are usual for a model: what a verb assumes, and says so, where a user gives none."""

from __future__ import annotations

from shardwise.model.architecture import Architecture
from shardwise.model.job import DEFAULT_SEQ_LEN
from shardwise.model.parameters_and_flops import num_params

# Tokens of a global batch by the size of the model, of published pre-training runs: below 1B parameters 0.5M and below 5B 1M
# (Brown et al. 2020, GPT-3, table 2.1), 7B to 70B 4M (Touvron et al. 2023, Llama 2, section 2.2; Llama 3 begins there), 405B 16M
# (Grattafiori et al. 2024, Llama 3, section 3.4.1).
USUAL_BATCH_TOKENS = ((1e9, 2**19), (5e9, 2**20), (2e11, 2**22), (float("inf"), 2**24))


def usual_batch_tokens(architecture: Architecture) -> int:
    """Return the tokens of a global batch that is usual for a model of this size.

    >>> import shardwise as sw
    >>> [usual_batch_tokens(sw.load_model(name)) for name in ("gpt-2", "llama-3-8b", "llama-3.1-405b")]
    [524288, 4194304, 16777216]
    """
    parameters = num_params(architecture)
    return next(tokens for limit, tokens in USUAL_BATCH_TOKENS if parameters < limit)


def usual_whole_batch(architecture: Architecture, seq_len: int) -> int:
    """Return the tokens of the usual batch in whole sequences of `seq_len` tokens, of at least one.

    >>> import shardwise as sw
    >>> usual_whole_batch(sw.load_model("gpt-2"), 1000)
    524000
    """
    return max(usual_batch_tokens(architecture) // seq_len, 1) * seq_len


def default_seq_len(architecture: Architecture) -> int:
    """Return the default tokens of a sequence: `DEFAULT_SEQ_LEN`, or fewer if the model's position table is shorter."""
    return min(DEFAULT_SEQ_LEN, architecture.max_positions or DEFAULT_SEQ_LEN)
