"""A few SVG elements, and the look they share: enough for our charts, without a plotting library."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

WIDTH = 960
"""Width of every chart, in pixels."""
_CHARACTER = 6.9
"""Mean width of a character at 13 pixels, rounded up: text is measured by the browser, legends are laid out here."""

STYLE = """
:root { --ink: #1b1e23; --soft: #5d6672; --line: #d5dae1; --paper: #ffffff; --card: #f5f7f9; --accent: #2f5bd0; --bad: #c8321f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e9ebee; --soft: #9ba5b1; --line: #3a4049; --paper: #14171b; --card: #1c2026; --accent: #8fb0ff; --bad: #ff8a78; }
}
svg text { font: 13px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); font-variant-numeric: tabular-nums; }
svg text.soft { fill: var(--soft); }
svg text.small { font-size: 11px; fill: var(--soft); }
svg text.title { font-weight: 650; font-size: 15px; }
svg text.head { font-weight: 700; font-size: 20px; }
svg text.bold { font-weight: 650; }
svg text.bad { fill: var(--bad); font-weight: 650; }
svg text.accent { fill: var(--accent); font-weight: 650; }
svg text.number { font-size: 10px; fill: #10131a; }
svg .paper { fill: var(--paper); }
svg .track { fill: var(--card); stroke: var(--line); }
svg .line { stroke: var(--line); fill: none; }
svg .edge { stroke: var(--ink); fill: none; }
svg .broken { stroke: var(--bad); stroke-dasharray: 4 4; fill: none; }
svg .curve { stroke: var(--accent); stroke-width: 2.5; fill: none; }
svg .dot { fill: var(--accent); stroke: var(--paper); stroke-width: 1.5; }
"""
# Long lines read better in a stylesheet than in Python, but they stay out of the line limit's way here.
STYLE = "\n".join(line.rstrip() for line in STYLE.strip().splitlines())


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
