"""Widths of the short texts in pictures, so that they fit into their boxes."""

WIDTHS = {"B": 0.69, "F": 0.58, "I": 0.3, "W": 0.99, "w": 0.82, ".": 0.32, "'": 0.28, "+": 0.84}
"""Widths of characters in DejaVu Sans of size 1, a wide font."""

DIGIT = 0.64


def text_width(text: str) -> float:
    """The width of the text of an action in a picture, in DejaVu Sans of size 1; Helvetica and Arial are narrower.

    >>> round(text_width("W10"), 2)
    2.27
    """
    return sum(WIDTHS.get(character, DIGIT) for character in text)
