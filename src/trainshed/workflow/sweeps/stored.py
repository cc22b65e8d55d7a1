"""The sweeps in a store: listed for `trainshed ls`, found by name, removed by `trainshed rm`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import InputError, NotFound
from trainshed.launch.submissions import state_folder
from trainshed.recipe import Cluster
from trainshed.run_folder import SWEEP_FILE, sweep_address, sweeps_in
from trainshed.storage import Store, join, open_folder, parse
from trainshed.storage.store import list_folders
from trainshed.workflow.prepare import store_options


@dataclass(frozen=True)
class StoredSweep:
    """A sweep by its folder, with what `sweep.json` holds."""

    address: str
    store: Store
    body: dict[str, Any]

    @property
    def sweep(self) -> str:
        """Name and id, as people write them."""
        return f"{self.body['name']}/{self.body['id']}"

    @property
    def runs(self) -> list[str]:
        """Its runs, by name and id."""
        return [run["run"] for run in self.body["runs"]]

    @property
    def state(self) -> str:
        """`done` where all its runs are, otherwise `failed` or `unfinished`."""
        states = {run["state"] for run in self.body["runs"]}
        return "done" if states == {"done"} else "failed" if states <= {"done", "failed"} else "unfinished"

    def summary(self) -> str:
        """How it stands, in a line."""
        runs = self.body["runs"]
        done = sum(run["state"] == "done" for run in runs)
        text = f"{done} of {len(runs)} runs done over {', '.join(self.body['keys'])}"
        losses = [(_final_loss(run), run) for run in runs]
        known = [(loss, run) for loss, run in losses if loss is not None]
        if not known:
            return text
        loss, best = min(known, key=lambda pair: pair[0])
        return f"{text}; lowest loss {loss:.4f} in {best['run']}"

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sweep": self.sweep,
            "folder": self.address,
            "state": self.state,
            "why": self.summary(),
            "runs": self.runs,
        }

    def remove(self) -> int:
        """Remove its folder, and return how many files it had; its runs stay."""
        infos = list(self.store.list(""))
        if "://" not in self.address:
            shutil.rmtree(self.address)
            parent = Path(self.address).parent
            if not any(parent.iterdir()):
                parent.rmdir()
            return len(infos)
        for info in sorted(infos, key=lambda info: info.path != SWEEP_FILE):
            self.store.delete(info.path)
        return len(infos)


def _final_loss(run: dict[str, Any]) -> float | None:
    loss = run["best_validation_loss"] if run["best_validation_loss"] is not None else run["loss"]
    return loss if loss is not None and isfinite(loss) else None


def stored_sweeps(cluster: Cluster) -> list[StoredSweep]:
    """Return the sweeps in a cluster's store, and those kept on this machine for stores it does not see."""
    root = parse(cluster.store_root)
    folder = Path(str(root)).expanduser() if root.scheme == "file" else None
    places: list[str] = []
    if folder is not None and folder.is_dir():
        places += map(str, sweeps_in(folder))
    elif (address := cluster.bucket_address(str(root)) if folder is not None else str(root)) is not None:
        store = open_folder(address, store_options(cluster))
        names = [(name, id) for name in list_folders(store, "sweeps") for id in list_folders(store, f"sweeps/{name}")]
        places += [sweep_address(address, name, id) for name, id in names]
    if cluster.target != "local":
        places += map(str, sweeps_in(state_folder().parent))
    return [sweep for place in places if (sweep := _read(place, cluster)) is not None]


def _read(address: str, cluster: Cluster) -> StoredSweep | None:
    store = open_folder(address, store_options(cluster))
    try:
        return StoredSweep(address, store, orjson.loads(store.read(SWEEP_FILE)))
    except (NotFound, orjson.JSONDecodeError):
        return None


def find_sweep(text: str, cluster: Cluster) -> StoredSweep | None:
    """Return the sweep that `text` means: its folder, NAME/ID, or its id; None where it means none."""
    wanted = text.strip().rstrip("/")
    if "://" in wanted or (Path(wanted).expanduser() / SWEEP_FILE).is_file():
        return _read(wanted if "://" in wanted else str(Path(wanted).expanduser()), cluster)
    matches = [sweep for sweep in stored_sweeps(cluster) if wanted in (sweep.sweep, sweep.body["id"])]
    if len(matches) > 1:
        places = ", ".join(join(sweep.address, SWEEP_FILE) for sweep in matches)
        raise InputError(f"there are {len(matches)} such sweeps: {places}", where=text, hint="write its folder")
    return matches[0] if matches else None
