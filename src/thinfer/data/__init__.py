"""Text that ships with the package, so that calibration, benchmarks and the demo need nothing from outside.

`war-and-peace-excerpt.txt` is Leo Tolstoy's *War and Peace*, book one, chapters I to XXIII, in the English translation
of Louise and Aylmer Maude (1922), as distributed by Project Gutenberg; it is in the public domain.
"""

from importlib.resources import files

_SPLIT = "CHAPTER IX\n"


def evaluation_text() -> str:
    """Chapters I to VIII, about 67,000 characters; disjoint from `calibration_text`."""
    text = _excerpt()
    return text[: text.index(_SPLIT)]


def calibration_text() -> str:
    """Chapters IX to XXIII, about 137,000 characters."""
    text = _excerpt()
    return text[text.index(_SPLIT) :]


def _excerpt() -> str:
    return (files(__name__) / "war-and-peace-excerpt.txt").read_text(encoding="utf-8")
