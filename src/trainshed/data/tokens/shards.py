"""How one PREFIX stands for many token files: `PREFIX-00003-of-00072.bin` and `.idx`."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from trainshed.data.tokens.token_file import local_path
from trainshed.errors import AddressError, InputError, NotFound
from trainshed.storage import open_store

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


def shard_name(prefix: str, shard: int, shards: int) -> str:
    """Return the prefix of one shard: `PREFIX-00003-of-00072`; of one alone, `PREFIX`."""
    return prefix if shards == 1 else f"{prefix}-{shard:05d}-of-{shards:05d}"


def set_prefix(shard: str) -> str | None:
    """Return the PREFIX of the set that a shard belongs to; None for one that stands alone."""
    match = re.fullmatch(r"(.*)-\d{5}-of-\d{5}", shard, re.DOTALL)
    return match[1] if match else None


def shard_prefixes(prefix: str | os.PathLike[str], options: StoreOptions | None = None) -> list[str]:
    """Return the prefixes a PREFIX stands for: itself, or all its `-00000-of-000NN` shards in order."""
    prefix = os.fspath(prefix)
    name = prefix.rpartition("/")[2]
    found = _indexes(prefix, options)
    whole = (1, None) in found
    totals = sorted({total for total, shard in found if shard is not None})
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
        raise AddressError(
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


def refuse_other_shards(prefix: str, shards: int, options: StoreOptions | None = None) -> None:
    """Stop before writing beside token files that another number of shards left at the same PREFIX."""
    others = sorted({total for total, _ in _indexes(prefix, options)} - {shards})
    if others:
        raise InputError(
            f"there are token files in {others[0]} shards with this prefix already; {shards} are asked for",
            where=prefix,
            hint=f"write --shards {others[0]}, another --output, or remove the old files",
        )


def _indexes(prefix: str, options: StoreOptions | None) -> set[tuple[int, int | None]]:
    """The `.idx` files of a prefix as (number of shards, shard); of a whole file (1, None)."""
    folder, slash, name = prefix.rpartition("/")
    pattern = re.compile(re.escape(name) + r"(?:-(\d{5})-of-(\d{5}))?\.idx")
    local = local_path(folder + slash or ".")
    if local is not None:
        names = os.listdir(local or ".") if os.path.isdir(local or ".") else []
    else:
        store, path = open_store(folder, options)
        names = [info.path.removeprefix(f"{path}/") for info in store.list(path)]
    matches = (pattern.fullmatch(each) for each in names)
    return {(int(m[2]), int(m[1])) if m[1] else (1, None) for m in matches if m}
