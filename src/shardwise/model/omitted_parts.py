"""Parts of a multimodal model that no plan has: towers of images and sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OmittedPart:
    """A part of a model that is left out, and its parameters; None where they are not known.

    >>> OmittedPart(name="vision tower", num_params=576_388_336).describe()
    'vision tower (0.58B parameters)'
    >>> OmittedPart(name="audio tower").describe()
    'audio tower (size not known)'
    """

    name: str
    num_params: int | None = None

    def describe(self) -> str:
        """Return the part and its size as reports print them."""
        size = "size not known" if self.num_params is None else f"{self.num_params / 1e9:.2f}B parameters"
        return f"{self.name} ({size})"


def config_notes(omitted_parts: Sequence[OmittedPart], stored_format: str) -> tuple[str, ...]:
    """Return sentences on what a config has and no plan does: other parts, and the format of stored weights."""
    parts = " and ".join(part.describe() for part in omitted_parts)
    omitted = (
        f"the config's language model alone is planned: its {parts} {'are' if ' and ' in parts else 'is'} left out"
    )
    stored = (
        f"the config's weights are stored in {stored_format}: planned is the model in the job's precision, not in that "
        "format"
    )
    return tuple(note for note, is_true in ((omitted, omitted_parts), (stored, stored_format)) if is_true)
