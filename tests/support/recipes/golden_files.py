"""Golden files: what we render, kept beside the tests; `UPDATE_GOLDEN=1 pytest` writes them anew."""

from __future__ import annotations

import os
import re

from support import TESTS

GOLDEN = TESTS / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare text with tests/golden/NAME."""
    path = GOLDEN / name
    # The driver's program changes with our code, and its ConfigMap is named by its hash.
    text = re.sub(r"-program-[0-9a-f]{10}", "-program-0000000000", text)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no {path}: UPDATE_GOLDEN=1 pytest writes it"
    assert text == path.read_text(encoding="utf-8")
