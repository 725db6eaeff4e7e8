"""Tokens that speculative decoding gains in a pass, by the rate at which drafted tokens are accepted.

A draft (a module of multi-token prediction, or a small model) proposes tokens, and one pass of the model verifies them: it
computes the last token and those drafted together, and accepts them up to the first that it would not have chosen itself. That
pass is a `SequenceGroup` with `new_tokens = num_logits = 1 + drafted`; a module of multi-token prediction runs once for each
drafted token (the unit "predict" of `inference_pass`).
"""

from __future__ import annotations

from shardwise.serve.inference_pass import DECODE, SequenceGroup
from shardwise.values import Value, where


def expected_tokens(acceptance: Value, drafted: Value) -> Value:
    """Return the tokens that a sequence gains in a pass on average, if each drafted token is accepted with this probability.

    It gains the token that the model chooses after those accepted, so 1 + a + ... + a^n = (1 - a^(n+1)) / (1 - a). Numbers or
    arrays. Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.

    >>> expected_tokens(0.5, 1), expected_tokens(0.5, 3), expected_tokens(1.0, 3), expected_tokens(0.0, 3)
    (1.5, 1.875, 4.0, 1.0)
    """
    rejection = where(acceptance < 1.0, 1.0 - acceptance, 1.0)
    return where(acceptance < 1.0, (1.0 - acceptance ** (drafted + 1.0)) / rejection, drafted + 1.0)


def verifying_group(num_seqs: Value, cached_tokens: Value, drafted: Value) -> SequenceGroup:
    """Return the group of sequences that decode with so many drafted tokens each.

    >>> group = verifying_group(64, 4095, 2)
    >>> group.new_tokens, group.num_logits
    (3, 3)
    """
    return SequenceGroup(
        kind=DECODE, num_seqs=num_seqs, new_tokens=1 + drafted, cached_tokens=cached_tokens, num_logits=1 + drafted
    )
