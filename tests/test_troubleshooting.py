"""Every message that the troubleshooting page quotes is still said somewhere in the source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_docs import string_literals

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OF_CYCLOPTS = {"Unknown option: --…"}
"""What the parser of the command line says."""


def quoted_messages() -> list[str]:
    tables = PAGE.split("## No message", 1)[0]
    cells = re.findall(r"^\| (`.*?`) \| ", tables, re.MULTILINE)
    spans = [span for cell in cells for span in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", cell)]
    return sorted({text.strip() for _, text in spans} - OF_CYCLOPTS)


@pytest.fixture(scope="module")
def literals() -> str:
    sources = sorted((ROOT / "src").rglob("*.py"))
    return "\n".join(text.replace("\n", " ") for file in sources for text in string_literals(file.read_text()))


def test_there_are_messages_to_look_up() -> None:
    assert len(quoted_messages()) > 70


def test_every_quoted_message_is_in_the_source(literals: str) -> None:
    def is_said(message: str) -> bool:
        # `…` is what an f-string fills in, at the ends too.
        parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
        return re.search(".{0,200}?".join(parts), literals) is not None

    assert [message for message in quoted_messages() if not is_said(message)] == []
