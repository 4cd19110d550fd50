"""Widths of texts against the metrics of the font."""

import pytest
from matplotlib.font_manager import FontProperties, findfont, get_font

from dure.core.text_width import WIDTHS, text_width


@pytest.mark.parametrize("character", [*WIDTHS, *"0123456789"])
def test_characters_are_as_wide_as_those_of_dejavu_sans(character):
    font = get_font(findfont(FontProperties(family="DejaVu Sans")))
    font.set_size(100, 72)
    width = font.load_char(ord(character)).linearHoriAdvance / 65536 / 100
    assert width - 0.01 < text_width(character) < width + 0.01
