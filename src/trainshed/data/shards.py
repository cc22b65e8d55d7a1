"""How one PREFIX stands for many token files: `PREFIX-00003-of-00072.bin` and `.idx`."""

from __future__ import annotations

import os
import re

from trainshed.errors import InputError, NotFound


def shard_name(prefix: str, shard: int, shards: int) -> str:
    """Return the prefix of one shard: `PREFIX-00003-of-00072`; of one alone, `PREFIX`."""
    return prefix if shards == 1 else f"{prefix}-{shard:05d}-of-{shards:05d}"


def shard_prefixes(prefix: str | os.PathLike[str]) -> list[str]:
    """Return the prefixes a PREFIX stands for: itself, or all its `-00000-of-000NN` shards in order."""
    prefix = os.fspath(prefix)
    folder, name = os.path.split(prefix)
    pattern = re.compile(re.escape(name) + r"-(\d{5})-of-(\d{5})\.idx")
    entries = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    found = {(int(m[2]), int(m[1])) for entry in entries if (m := pattern.fullmatch(entry))}
    totals = sorted({total for total, _ in found})
    whole = os.path.exists(prefix + ".idx")
    if whole and totals:
        raise InputError(
            "there is both a whole file and a sharded one",
            where=prefix,
            hint=f"remove {name}.bin/.idx or the {name}-*-of-{totals[0]:05d} files, whichever is stale",
        )
    if whole:
        return [prefix]
    if len(totals) > 1:
        raise InputError(
            f"there are shards of several preparations: of {' and of '.join(map(str, totals))}",
            where=prefix,
            hint="remove the stale ones",
        )
    if not totals:
        raise NotFound(
            "no token files with this prefix",
            where=prefix,
            hint=f"expected {name}.idx or {name}-00000-of-….idx",
        )
    (total,) = totals
    missing = [shard_name(name, shard, total) + ".idx" for shard in range(total) if (total, shard) not in found]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise NotFound(
            f"{len(missing)} of {total} shards are missing: {shown}",
            where=prefix,
            hint="run their tasks again (`trainshed data prepare … --task i/N`), or copy them here",
        )
    return [f"{prefix}-{shard:05d}-of-{total:05d}" for shard in range(total)]


def refuse_other_shards(prefix: str, shards: int) -> None:
    """Stop before writing beside token files that another number of shards left at the same PREFIX."""
    folder, name = os.path.split(prefix)
    if "://" in prefix or not os.path.isdir(folder or "."):
        return
    pattern = re.compile(re.escape(name) + r"(?:-\d{5}-of-(\d{5}))?\.idx")
    counts = {int(m[1] or 1) for entry in os.listdir(folder or ".") if (m := pattern.fullmatch(entry))}
    others = sorted(counts - {shards})
    if others:
        raise InputError(
            f"there are token files in {others[0]} shards with this prefix already; {shards} are asked for",
            where=prefix,
            hint=f"write --shards {others[0]}, another --output, or remove the old files",
        )
