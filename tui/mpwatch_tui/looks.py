"""How things look: glyphs for this terminal, styles by role, and text that cannot draw or command.

A piece of a row is (text, role); widgets turn roles into styles. Neighbouring colours differ in
brightness too, since 16-colour terminals make neighbours one; without colours, glyphs differ.
"""

from typing import Final, Literal

import msgspec
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from mpwatch.vocabulary import PHASES, clean_text

Role = str
Piece = tuple[str, Role]
Row = tuple[Piece, ...]
Tone = Literal["output", "event", "good", "warn", "bad"]

_STYLES: Final[dict[Role, Style]] = {
    "plain": Style(),
    "output": Style(),
    "strong": Style(bold=True),
    "dim": Style(color="#8a8a8a"),
    "event": Style(color="#87afd7"),
    "good": Style(color="#5fd75f"),
    "warn": Style(color="#ffd75f"),
    "bad": Style(color="#ff5f5f", bold=True),
    "key": Style(color="#ffd75f", bold=True),
    "title": Style(color="#8a8a8a"),
    "loss": Style(color="#5fffff"),
    "scale": Style(color="#ffaf5f"),
    "norm": Style(color="#ff87ff"),
    "seconds": Style(color="#87ff87"),
    "memory": Style(color="#87afff"),
    "data": Style(color="#3a5fcd"),
    "forward": Style(color="#5fffff"),
    "backward": Style(color="#af00af"),
    "optimizer": Style(color="#ffff5f"),
    "evaluation": Style(color="#008700"),
    "saving": Style(color="#ffffff"),
    "resuming": Style(color="#008787"),
    "other": Style(color="#6c6c6c"),
}
# One glyph per phase for terminals without colours; none of them needs more than ASCII.
_PHASE_GLYPHS: Final[dict[str, str]] = dict(zip(PHASES, "d#=+e%r.", strict=True))


def style_of(role: Role) -> Style:
    """The style of a role; one without a style of its own is plain."""
    return _STYLES.get(role, _STYLES["plain"])


class WithoutColours(LineFilter):
    """What NO_COLOR asks for: no code of any colour is sent. Textual's own filter sends greys."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(text, None if style is None else style.without_color, control)
            for text, style, control in segments
        ]


class Looks(msgspec.Struct, frozen=True, kw_only=True):
    """What this terminal can show: only ASCII, or Unicode; colours, or none."""

    ascii: bool = False
    colours: bool = True

    def text(self, untrusted: str, limit: int = 2000) -> str:
        """Text of a script or a file as it may be shown: one line, no control characters."""
        text = clean_text(untrusted, limit)
        return text.encode("ascii", "replace").decode("ascii") if self.ascii else text

    @property
    def rule(self) -> str:
        return "-" if self.ascii else "\u2500"

    @property
    def dot(self) -> str:
        return "-" if self.ascii else "\u00b7"

    @property
    def times(self) -> str:
        return "x" if self.ascii else "\u00d7"

    @property
    def lamp(self) -> str:
        return "*" if self.ascii else "\u25cf"

    @property
    def mark(self) -> str:
        """Above a column of a plot in which something happened."""
        return "v" if self.ascii else "\u25be"

    def fill(self, phase: str) -> str:
        """What a phase's bar is made of."""
        if self.colours and not self.ascii:
            return "\u2588"
        return _PHASE_GLYPHS.get(phase, ".")

    @property
    def level(self) -> str:
        """What a bar that stands alone is made of."""
        return "#" if self.ascii or not self.colours else "\u2588"
