"""The tables "their key, our key" of the documentation, written from the key tables of the engines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from trainshed.engines.key_table import KeyRow
from trainshed.engines.megatron.keys import MEGATRON_TABLE
from trainshed.engines.nemo.bridge_keys import BRIDGE_TABLE
from trainshed.engines.nemo.hydra_keys import HYDRA_PLACES, HYDRA_TABLE
from trainshed.engines.torchtune.keys import TORCHTUNE_TABLE

TableName = Literal["megatron", "nemo-bridge", "nemo-24.07", "torchtune"]
_ROWS: dict[TableName, tuple[KeyRow, ...]] = {
    "megatron": MEGATRON_TABLE.rows,
    "nemo-bridge": BRIDGE_TABLE.rows,
    "nemo-24.07": (*HYDRA_TABLE.rows, *HYDRA_PLACES.rows),
    "torchtune": TORCHTUNE_TABLE.rows,
}
_PLACE = re.compile(r"(<!-- keys of ([\w.-]+): begin -->\n).*?(<!-- keys of \2: end -->)", re.DOTALL)


def fill_key_tables(page: str) -> str:
    """Return a page with the tables that it has places for, `<!-- keys of NAME: begin -->`, written anew."""

    def table(match: re.Match[str]) -> str:
        name = next(known for known in _ROWS if known == match[2])
        return f"{match[1]}{key_reference(name)}{match[3]}"

    return _PLACE.sub(table, page)


def key_reference(name: TableName) -> str:
    """Return every key of an engine's table beside the recipe's, by sections of the recipe."""
    rows = [row for row in _ROWS[name] if row.keys]
    decided = sorted({key for row in rows if row.chosen for key in row.keys})
    lines = ["| theirs | recipe | |", "|---|---|---|"]
    by_path: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if not row.chosen:
            by_path.setdefault((row.path, _remark(row)), []).extend(row.keys)
    for (path, remark), keys in sorted(by_path.items(), key=lambda item: item[0]):
        lines.append(f"| {_written(keys, name)} | {_ours(path)} | {remark} |")
    text = "\n".join(lines)
    if decided:
        text += f"\n\nTrainshed sets these, and `engine.args` can override them: {_written(decided, name)}."
    return f"{text}\n"


def _remark(row: KeyRow) -> str:
    if row.drop:
        return f"dropped: {row.drop}".replace("|", "\\|")
    return "" if row.note in ("", row.path) else row.note.replace("|", "\\|")


def _written(keys: Iterable[str], name: TableName) -> str:
    shown = (f"--{key.replace('_', '-')}" if name == "megatron" else key for key in dict.fromkeys(keys))
    return ", ".join(f"`{key}`" for key in shown)


def _ours(path: str) -> str:
    """A key of the recipe as code, words as they are."""
    return f"`{path}`" if re.fullmatch(r"[\w.*\[\]]+", path) else path
