"""Files that verbs draw to: their names as arguments, and how they are written."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.present.charts.drawing import Drawing


def picture_name(text: str) -> str:
    """The name of a picture. Raises `ArgumentTypeError` for an ending that no picture has, or that needs matplotlib."""
    from shardwise.present.charts.matplotlib_export import ENDINGS, require_matplotlib
    from shardwise.values import InputError

    ending = ending_of(text)
    if ending not in ENDINGS:
        raise argparse.ArgumentTypeError(f"found {text!r}; a name that ends in {', '.join(ENDINGS)} is required")
    if ending != ".svg":
        try:
            require_matplotlib(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def picture_name_or_dash(text: str) -> str:
    """The name of a picture, or "-"."""
    return text if text == "-" else picture_name(text)


def ending_of(name: str) -> str:
    """What a file's name ends in, in small letters."""
    from pathlib import PurePath

    return PurePath(name.strip()).suffix.lower()


def write_picture(flag: str, target: str, drawing: Drawing) -> None:
    """Write a drawing in the form of the file's ending. Raises `InputError` where that cannot be."""
    from pathlib import Path

    from shardwise.present.charts.matplotlib_export import encoded
    from shardwise.values import InputError

    try:
        Path(target).write_bytes(encoded(drawing, ending_of(target)))
    except OSError as error:
        raise InputError(f"{flag}: cannot write {target}: {error.strerror}; choose a writable path") from None
