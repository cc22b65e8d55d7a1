"""A few SVG elements, and the look they share: enough for our charts, without a plotting library."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH = 960
"""Width of every chart, in pixels."""
_CHARACTER = 7.5
"""Mean width of a character at 13 pixels, rounded up: text is measured by the browser, legends are laid out here."""

STYLE = Path(__file__).with_name("drawing.css").read_text(encoding="utf-8")
"""Colours follow the reader's choice of light or dark."""


def number(value: float) -> str:
    """Write a coordinate with a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass
class Drawing:
    """Elements one below the other; `height` grows as they are added."""

    width: float = WIDTH
    height: float = 0.0
    elements: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str = "", css: str = "", tip: str = ""
    ) -> None:
        """Draw a box, with a text that shows when it is pointed at."""
        look = f' fill="{fill}"' if fill else ""
        look += f' class="{css}"' if css else ""
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        box = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self.elements.append(f"<rect {box}{look}>{inside}</rect>" if inside else f"<rect {box}{look}/>")

    def text(self, x: float, y: float, words: str, css: str = "", anchor: str = "") -> None:
        """Write words with their baseline at y."""
        look = f' class="{css}"' if css else ""
        look += f' text-anchor="{anchor}"' if anchor else ""
        self.elements.append(f'<text x="{number(x)}" y="{number(y)}"{look}>{escape(words)}</text>')

    def path(self, points: list[tuple[float, float]], css: str = "line") -> None:
        """Draw a line through points."""
        steps = " ".join(f"{'M' if not place else 'L'}{number(x)} {number(y)}" for place, (x, y) in enumerate(points))
        self.elements.append(f'<path d="{steps}" class="{css}"/>')

    def dot(self, x: float, y: float, tip: str) -> None:
        """Draw a point of a curve."""
        self.elements.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="4.5" class="dot"><title>{escape(tip)}</title></circle>'
        )

    def legend(self, y: float, entries: list[tuple[str, str]], *, left: float = 0.0) -> float:
        """Set swatches of colour and their words; return the y below them."""
        x = left
        for colour, words in entries:
            wide = 18 + len(words) * _CHARACTER
            if x > left and x + wide > self.width:
                x, y = left, y + 20
            self.rect(x, y - 10, 11, 11, fill=colour)
            self.text(x + 16, y, words, "soft")
            x += wide + 16
        return y + 12

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Put another drawing in at a place."""
        self.elements.append(f'<g transform="translate({number(x)} {number(y)})">')
        self.elements += other.elements
        self.elements.append("</g>")

    def svg(self, *, style: str = "", label: str) -> str:
        """Return the drawing as an SVG element; with a style it stands alone as a file."""
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} width="{number(self.width)}" role="img"'
        look = f"<style>\n{style}\n</style>\n" if style else ""
        return f'{head} aria-label="{escape(label)}">\n{look}' + "\n".join(self.elements) + "\n</svg>\n"
