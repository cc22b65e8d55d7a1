"""What `scontrol --oneliner show` prints, as keys and values.

The text is the same since Slurm 14; its JSON is not there before 21.08 and changes shape with every release.
"""

from __future__ import annotations

import re

_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/]*)=(\S*)")


def fields_of(line: str) -> dict[str, str]:
    """Read one line; of a key that is there twice the first counts (later ones may be part of a person's text)."""
    found: dict[str, str] = {}
    for match in _FIELD.finditer(line):
        found.setdefault(match[1], match[2])
    return found
