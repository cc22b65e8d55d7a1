"""Checkpoints that another engine wrote into a run's folder: listed, proven as far as their format goes, removed.

    checkpoints-megatron/iter_0000100/    Megatron-LM (`megatron/retention.py`)
    checkpoints/iter_0000100/             Megatron-Bridge: the same, and `train_state.pt`; `run_config.yaml` is the last
    checkpoints/epoch_0/, step_100/       torchtune: the weights, and the state of the run beside them or (0.6) in
                                          `recipe_state/`; the last weights of a run have none
    checkpoints/…step=100…                NeMo 24.07: a file `….-unfinished` beside it while it is written

None of them has a manifest. What can be proven: every file that the table of contents names is there and long enough,
and the checksums that torch.save stores beside each tensor hold. Weights in safetensors have none: their length is
compared with what the header says.

No torch here.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainshed.checkpoints.megatron.retention import (
    is_complete,
    iteration_folders,
    latest_iteration,
    remove_old,
)
from trainshed.checkpoints.torch_save_reader import open_zip_window, restricted_unpickle
from trainshed.errors import InputError, TrainshedError
from trainshed.run_folder import CHECKPOINTS, MEGATRON_CHECKPOINTS

ForeignEngine = Literal["megatron", "megatron-bridge", "torchtune", "nemo"]
METADATA = ".metadata"
BRIDGE_STATE = "train_state.pt"
BRIDGE_LATEST = f"latest_{BRIDGE_STATE}"
_BRIDGE_CONFIG = "run_config.yaml"
_TORCHTUNE = re.compile(r"(epoch|step)_(\d+)")
_INDEX = "model.safetensors.index.json"
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NEMO = re.compile(r".*step=(\d+).*")
_NEMO_UNFINISHED = "-unfinished"


@dataclass(frozen=True)
class ForeignCheckpoint:
    """One checkpoint of another engine; `reason` says why it is not complete."""

    step: int
    path: Path
    bytes: int
    reason: str | None = None
    latest: bool = False

    @property
    def complete(self) -> bool:
        """Whether the engine could go on from it."""
        return self.reason is None


@dataclass(frozen=True)
class ForeignListing:
    """The checkpoints of one engine in a run, newest first."""

    engine: ForeignEngine
    folder: Path
    checkpoints: tuple[ForeignCheckpoint, ...]

    @property
    def latest(self) -> int | None:
        """The step that the engine would go on from."""
        return next((checkpoint.step for checkpoint in self.checkpoints if checkpoint.latest), None)


def list_foreign(run: Path) -> ForeignListing | None:
    """Return what another engine has saved in a run's folder, None where none has."""
    readers: tuple[tuple[str, Callable[[Path], ForeignListing | None]], ...] = (
        (MEGATRON_CHECKPOINTS, _list_megatron),
        (CHECKPOINTS, _list_megatron),
        (CHECKPOINTS, _list_torchtune),
        (CHECKPOINTS, _list_nemo),
    )
    listings = (read(run / part) for part, read in readers if (run / part).is_dir())
    return next((listing for listing in listings if listing is not None), None)


def _list_megatron(folder: Path) -> ForeignListing | None:
    folders = iteration_folders(folder)
    if not folders:
        return None
    bridge = folder.name == CHECKPOINTS
    latest = latest_iteration(folder)
    if latest is None and bridge and (folder / BRIDGE_LATEST).is_file():
        latest = max((number for number, path in folders.items() if (path / BRIDGE_STATE).is_file()), default=None)
    rows = []
    for iteration, path in folders.items():
        reason = None
        if not is_complete(path):
            reason = "it has no table of contents: its save or its removal was interrupted"
        elif latest is None or iteration > latest:
            reason = f"its save has not ended: the latest is {'none' if latest is None else latest}"
        elif bridge and not (path / _BRIDGE_CONFIG).is_file():
            # Written after what names the latest; without it Megatron-Bridge takes the folder for one of Megatron-LM.
            reason = f"its save has not ended: it has no {_BRIDGE_CONFIG}"
        rows.append(ForeignCheckpoint(iteration, path, _size(path), reason, latest=iteration == latest))
    return _listing("megatron-bridge" if bridge else "megatron", folder, rows)


def _list_torchtune(folder: Path) -> ForeignListing | None:
    named = [(match, path) for path in folder.iterdir() if path.is_dir() and (match := _TORCHTUNE.fullmatch(path.name))]
    if not named:
        return None
    epochs = [(match, path) for match, path in named if match[1] == "epoch"]
    # torchtune goes on from the last epoch, and only without one from the last step.
    newest = max(int(match[2]) for match, _ in epochs or named)
    rows = []
    for match, path in named:
        latest = int(match[2]) == newest and (match[1] == "epoch" or not epochs)
        rows.append(ForeignCheckpoint(int(match[2]), path, _size(path), _unfinished_weights(path), latest=latest))
    return _listing("torchtune", folder, rows)


def _unfinished_weights(path: Path) -> str | None:
    """Return why weights of torchtune are not whole: it writes the index, or an adapter's config, after them."""
    index, config = path / _INDEX, path / _ADAPTER_CONFIG
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            return f"{_INDEX} was not written to its end"
    elif config.is_file():
        names = [_ADAPTER_WEIGHTS]
    else:
        return f"it has neither {_INDEX} nor {_ADAPTER_CONFIG}, which are written last"
    for name in names:
        if not (path / name).is_file():
            return f"{name} is missing"
        if (damage := _safetensors_damage(path / name)) is not None:
            return f"{name} {damage}"
    return None


def newest_torchtune(run: Path) -> Path | None:
    """Return the newest whole weights that torchtune has saved in a run's folder, None where it has saved none."""
    folder = run / CHECKPOINTS
    listing = _list_torchtune(folder) if folder.is_dir() else None
    if listing is None:
        return None
    whole = [row for row in listing.checkpoints if row.complete]
    return max(whole, key=lambda row: (row.path.name.startswith("epoch"), row.step)).path if whole else None


def _list_nemo(folder: Path) -> ForeignListing | None:
    named = [(match, path) for path in folder.iterdir() if (match := _NEMO.fullmatch(path.name))]
    finished = [(match, path) for match, path in named if not path.name.endswith(_NEMO_UNFINISHED)]
    if not finished:
        return None
    unfinished = {path.name.removesuffix(_NEMO_UNFINISHED) for _, path in named if (path.name.endswith("unfinished"))}
    rows = []
    for match, path in finished:
        being_written = path.name in unfinished or path.stem in unfinished
        reason = "its save has not ended" if being_written else None
        rows.append(ForeignCheckpoint(int(match[1]), path, _size(path), reason))
    newest = max((row.step for row in rows if row.complete), default=None)
    rows = [ForeignCheckpoint(row.step, row.path, row.bytes, row.reason, row.step == newest) for row in rows]
    return _listing("nemo", folder, rows)


def _listing(engine: ForeignEngine, folder: Path, rows: list[ForeignCheckpoint]) -> ForeignListing:
    return ForeignListing(engine, folder, tuple(sorted(rows, key=lambda row: row.step, reverse=True)))


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def find_damage(checkpoint: ForeignCheckpoint) -> str | None:
    """Read every byte of a checkpoint and return the first thing that is wrong with it, None if nothing is."""
    path = checkpoint.path
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    try:
        for folder in {file.parent for file in files if file.name == METADATA}:
            if (damage := next(_table_damage(folder), None)) is not None:
                return damage
        for file in files:
            if (damage := _file_damage(file)) is not None:
                return f"{file.relative_to(path) if file != path else file.name}: {damage}"
    except TrainshedError as error:
        return error.what
    except OSError as error:
        return str(error)
    return None


def _table_damage(folder: Path) -> Iterator[str]:
    """Yield items of a `torch_dist` checkpoint that are missing, cut short, or do not have their checksum."""
    file = folder / METADATA
    table = restricted_unpickle(file.read_bytes(), str(file))
    try:
        items = [
            (str(info["relative_path"]), int(info["offset"]), int(info["length"]), str(index["fqn"]))
            for index, info in table["storage_data"].items()
        ]
    except (AttributeError, KeyError, TypeError) as error:
        yield f"{METADATA} is not a table of a checkpoint: {error!r}"
        return
    for name, start, length, key in sorted(items):
        if not (folder / name).is_file():
            yield f"{name} is missing"
        elif start + length > (size := (folder / name).stat().st_size):
            yield f"{name} has {size} bytes, and `{key}` ends at {start + length}"
        elif not _checksums_hold(folder / name, start, length):
            yield f"{name}: `{key}` does not have its checksum"


def _file_damage(file: Path) -> str | None:
    if file.suffix in (".pt", ".pth", ".ckpt"):
        return None if _checksums_hold(file, 0, file.stat().st_size) else "a tensor does not have its checksum"
    if file.suffix == ".safetensors":
        return _safetensors_damage(file)
    if file.suffix == ".json":
        try:
            json.loads(file.read_bytes())
        except ValueError as error:
            return f"is not JSON: {error}"
    return None


def _checksums_hold(file: Path, start: int, length: int) -> bool:
    """Whether everything in a file of torch.save, or in one inside a larger file, has its checksum."""
    try:
        with open_zip_window(file, start, length) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, EOFError):
        return False


def _safetensors_damage(file: Path) -> str | None:
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        size = file.stat().st_size
        if 8 + length > size:
            return "ends within its header"
        try:
            header: dict[str, Any] = json.loads(content.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError):
            return "has a broken header"
    return None if size == 8 + length + end else f"has {size} bytes instead of {8 + length + end}"


def prune_foreign(listing: ForeignListing, keep: int | None) -> list[int]:
    """Remove old checkpoints but the newest `keep` (None: none of them), and what an interrupted save has left."""
    if listing.engine != "megatron":
        name = {"megatron-bridge": "Megatron-Bridge", "torchtune": "torchtune", "nemo": "NeMo"}[listing.engine]
        raise InputError(
            f"{name} removes its old checkpoints itself, as `checkpoint.keep` tells it, or keeps them all",
            where=str(listing.folder),
            hint="leave --prune out; --verify finds broken ones",
        )
    if keep is not None and keep < 1:
        raise InputError(f"keep {keep}: the newest checkpoint is never removed", hint="keep 1 or more")
    return remove_old(listing.folder, keep, lambda: True)
