"""Text of a script is shown as text: what is invisible, or turns its order, is taken out."""

import unicodedata

from mpwatch.vocabulary import clean_text

# Unicode's classes: formats, separators of lines and paragraphs, controls, surrogates.
UNSEEN = ("Cf", "Zl", "Zp", "Cc", "Cs")
# Formats that have a glyph all the same: signs around numbers, and joints of hieroglyphs.
SEEN = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
SEEN |= set(range(0x13430, 0x13440))


def test_nothing_is_let_through_that_is_invisible_or_turns_the_order_of_others() -> None:
    unseen = [n for n in range(0x11_0000) if unicodedata.category(chr(n)) in UNSEEN]
    assert {0x61C, 0x200B, 0x2028, 0x202E, 0xFEFF, 0xE0041} <= set(unseen)
    through = [n for n in unseen if clean_text(f"a{chr(n)}b") not in ("ab", "a b", "a?b")]
    assert [hex(n) for n in through if n not in SEEN] == []


def test_what_can_be_seen_stays() -> None:
    shown = "gr\u00fc\u00df \u4f60\u597d \u0645\u0631\u062d \u05e9 \U0001f680 e\u0301 \u2588\u28ff"
    assert clean_text(shown) == shown
    assert clean_text("a\u2028b\u2029c\nd\te") == "a b c d e"
