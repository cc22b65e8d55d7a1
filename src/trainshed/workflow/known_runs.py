"""The run or the model that somebody names: one way for every verb that takes one.

NAME, NAME/ID, NAME-ID    in the store of `--on` (`./store`), or submitted from this machine; the newest of several
a folder or a URL         the run's own folder, on a disk or in a bucket
a recipe file             the run of that recipe, with the overrides and `--id` it was started with

A model is a folder or an address of weights, or the newest checkpoint of a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainshed.errors import InputError, NoSuchName, TrainshedError
from trainshed.run_folder import CHECKPOINTS, EXPORT, MEGATRON_CHECKPOINTS, RECIPE_FILE, is_run

if TYPE_CHECKING:
    from trainshed.launch.submissions import Submission
    from trainshed.recipe import Cluster
    from trainshed.storage import Store, StoreOptions


_NAMED_RUNS = 5  # how many runs an error names


@dataclass(frozen=True)
class KnownRun:
    """A run: where its folder is (`address`), and the record of its submission where it was sent from here."""

    name: str
    id: str
    address: str
    submission: Submission | None = None
    options: StoreOptions | None = field(default=None, compare=False, repr=False)
    """How to reach the bucket that it is in."""

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.name}/{self.id}"

    @property
    def folder(self) -> Path | None:
        """Its folder as far as this machine sees it."""
        if "://" in self.address:
            return None
        path = Path(self.address).expanduser()
        return path if path.is_dir() else None

    @property
    def home(self) -> str | None:
        """Where its files are read from here: its folder, or a bucket; None where this machine sees neither."""
        if "://" in self.address:
            return self.address
        if self.folder is not None:
            return str(self.folder)
        # Its jobs may see a bucket as a disk, which is not mounted here.
        return None if self.submission is None else self.submission.cluster.bucket_address(self.address)

    def store(self) -> Store:
        """Its files, on a disk or in a bucket; raises where this machine sees neither."""
        from trainshed.storage import LocalStore, open_folder

        home = self.home
        if home is None:
            return LocalStore(self.local_folder())
        return open_folder(home, self.options) if "://" in home else LocalStore(home)

    def local_folder(self) -> Path:
        """Its folder; raises where this machine does not see it."""
        if self.folder is None:
            place = f"on {self.submission.cluster.name}" if self.submission else "elsewhere"
            raise NoSuchName(
                f"the run {self.run} is {place}, and its folder is not mounted here",
                where=self.address,
                hint="fetch its export or a checkpoint, or write this command there",
            )
        return self.folder

    def submitted(self, what: str) -> Submission:
        """The record of its submission; raises where the run is not a job of a cluster, which `what` needs."""
        if self.submission is None:
            raise InputError(
                f"{self.run} was not submitted from here, and {what} is for a job on a cluster",
                where=self.address,
                hint=f"`trainshed status {self.run}` says how it stands",
            )
        return self.submission


def find_run(
    text: str,
    *,
    on: Cluster | str | os.PathLike[str] = "local",
    overrides: Sequence[str] = (),
    id: str | None = None,
) -> KnownRun:
    """Return the run that `text` means; `overrides` and `id` go with a recipe."""
    from trainshed.recipe import as_cluster, split_overrides

    _check_named(text)
    wanted = text.strip().rstrip("/") or text
    for_recipe, for_cluster = split_overrides(overrides)
    cluster = as_cluster(on, for_cluster)
    if _is_run_folder(wanted):
        if for_recipe or id:
            what = f"'{for_recipe[0]}'" if for_recipe else f"--id {id}"
            raise InputError(f"{what} belongs to a recipe, and {text} is a run", hint="leave it out")
        return _run_at(wanted, cluster)
    known, problem = known_runs(cluster)
    if not for_recipe:
        named = f"{wanted}/{id}" if id else wanted
        for run in known:
            if named in (run.name, run.run, f"{run.name}-{run.id}", run.address):
                return run
    if for_recipe or id or Path(wanted).suffix in (".yaml", ".yml"):
        return _run_of_recipe(wanted, cluster, for_recipe, id, known)
    if Path(wanted).expanduser().is_dir():
        return _run_at(wanted, cluster)
    raise problem or _no_such_run(text, known)


def _check_named(text: str) -> None:
    """Refuse an empty name, which a path would take for this folder: a shell's variable may not be set."""
    if not text.strip():
        raise InputError("the name of the run is empty", hint="write NAME, NAME/ID or its folder (`trainshed ls`)")


def known_runs(cluster: Cluster) -> tuple[list[KnownRun], TrainshedError | None]:
    """Return the runs in a cluster's store, on a disk or in a bucket, and those submitted from here; newest first.

    Where the store cannot be listed, that error comes with those that were submitted.
    """
    from trainshed.launch.submissions import submissions

    submitted = [(submission, submitted_run(submission)) for submission in submissions()]
    by_location = {_location(run): submission for submission, run in submitted}
    rows: list[tuple[float, KnownRun]] = []
    listed_jobs: set[str] = set()
    problem = None
    try:
        for changed, run in _runs_in_store(cluster):
            submission = by_location.get(_location(run))
            rows.append((changed, replace(run, submission=submission)))
            listed_jobs |= {submission.submitted.job} if submission is not None else set()
    except TrainshedError as error:
        problem = error
    rows += [(submission.at, run) for submission, run in submitted if submission.submitted.job not in listed_jobs]
    return [run for _, run in sorted(rows, key=lambda row: row[0], reverse=True)], problem


def submitted_run(submission: Submission) -> KnownRun:
    """Return the run of a submission."""
    from trainshed.workflow.prepare import store_options

    options = store_options(submission.cluster)
    return KnownRun(submission.name, submission.id, submission.submitted.run, submission, options)


def _location(run: KnownRun) -> str:
    """Where a run's folder is: the same for the run in a store and for its submission."""
    place = run.home or run.address
    return place if "://" in place else str(Path(place).expanduser().absolute())


def _runs_in_store(cluster: Cluster) -> Iterator[tuple[float, KnownRun]]:
    """Yield the runs in a cluster's store with when they were last changed, as far as it is seen here."""
    from trainshed.launch.local import local_runs
    from trainshed.launch.stored_run import bucket_runs
    from trainshed.storage import join, open_folder, parse
    from trainshed.workflow.prepare import store_options

    root = parse(cluster.store_root)
    if root.scheme == "file" and (folder := Path(str(root)).expanduser()).is_dir():
        for run in local_runs(folder):
            yield run.changed_seconds, KnownRun(run.name, run.id, str(run.folder))
        return
    address = cluster.bucket_address(str(root)) if root.scheme == "file" else str(root)
    if address is not None:
        options = store_options(cluster)
        for in_bucket in bucket_runs(open_folder(address, options)):
            run = KnownRun(in_bucket.name, in_bucket.id, join(address, in_bucket.folder), None, options)
            yield in_bucket.changed_seconds, run


def _is_run_folder(text: str) -> bool:
    """Whether a text is the folder of a run; a folder of another kind may have the name of a run."""
    folder = Path(text).expanduser()
    return "://" in text or (folder.is_dir() and (folder.absolute().name == CHECKPOINTS or is_run(folder)))


def _run_at(address: str, cluster: Cluster) -> KnownRun:
    """The run of a folder, which may also be called by its `checkpoints`."""
    from trainshed.launch.submissions import submissions
    from trainshed.workflow.prepare import store_options

    place = address.rstrip("/").removesuffix(f"/{CHECKPOINTS}")
    if "://" not in place:
        folder = Path(place).expanduser()
        folder = folder.parent if folder.absolute().name == CHECKPOINTS else folder
        place, parts = str(folder), folder.absolute().parts
    else:
        parts = tuple(place.split("/"))
    record = next((submission for submission in submissions() if _same_address(submission.submitted.run, place)), None)
    return KnownRun(parts[-2] if len(parts) > 1 else "", parts[-1], place, record, store_options(cluster))


def _same_address(one: str, other: str) -> bool:
    if "://" in one or "://" in other:
        return one == other
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()


def _run_of_recipe(
    text: str, cluster: Cluster, overrides: Sequence[str], id: str | None, known: Sequence[KnownRun]
) -> KnownRun:
    """The run of a recipe: what it resolves to says the id."""
    from trainshed.recipe import load_recipe
    from trainshed.recipe.load import chosen_run_id
    from trainshed.storage import join
    from trainshed.workflow.prepare import resolve, store_options

    recipe = resolve(load_recipe(text, overrides), store_options(cluster))
    name = chosen_run_id(recipe, id)
    address = join(recipe.store or cluster.store_root, f"runs/{recipe.name}/{name}")
    # A store that the recipe names is the one meant, whatever lies under the same name elsewhere.
    anywhere = recipe.store is None
    same_runs = (
        run for run in known if run.run == f"{recipe.name}/{name}" and (anywhere or _same_address(run.address, address))
    )
    if (started := next(same_runs, None)) is not None:
        return started
    if "://" not in address and not Path(address).expanduser().is_dir():
        alike = ", ".join(run.run for run in known if run.name == recipe.name)
        raise NoSuchName(
            f"the run {recipe.name}/{name} of this recipe was not started",
            where=text,
            hint=f"runs of this name: {alike}" if alike else f"`trainshed run {text}` starts it",
        )
    return KnownRun(recipe.name, name, address, None, store_options(cluster))


def _no_such_run(text: str, known: Sequence[KnownRun]) -> NoSuchName:
    names = ", ".join(run.run for run in known[:_NAMED_RUNS]) or "none yet"
    more = f" and {len(known) - _NAMED_RUNS} more" if len(known) > _NAMED_RUNS else ""
    return NoSuchName(
        "there is no such folder, and no such run in the store here or among those submitted from here",
        where=text,
        hint=f"runs: {names}{more} (`trainshed ls`); a run is NAME, NAME/ID, its folder or its recipe file",
    )


def checkpoint_address(text: str, on: Cluster | str | os.PathLike[str] = "local") -> str:
    """Return where the weights are that somebody means: a folder of weights, or a run as `find_run` finds it.

    Of a run that is its best or newest checkpoint, or its export where an engine of others trained it.
    """
    _check_named(text)
    if "://" in text:
        return text
    folder = Path(text).expanduser()
    if folder.is_dir() and not (folder / RECIPE_FILE).is_file() and _has_weights(folder):
        return str(folder)
    run = find_run(text, on=on).local_folder()
    # A folder that is neither weights nor a run is named in what its reader says.
    return _weights_of_run(run) if (run / RECIPE_FILE).is_file() else str(run)


def _has_weights(folder: Path) -> bool:
    """Whether a folder holds weights, or an adapter to some."""
    from trainshed.checkpoints.formats import detect_format
    from trainshed.checkpoints.lora.peft_config import ADAPTER_CONFIG
    from trainshed.errors import TrainshedError

    try:
        detect_format(folder)
    except TrainshedError:
        return (folder / ADAPTER_CONFIG).is_file()
    return True


def _weights_of_run(run: Path) -> str:
    from trainshed.checkpoints.foreign import newest_torchtune
    from trainshed.checkpoints.formats import detect_format
    from trainshed.errors import NotFound

    if (weights := newest_torchtune(run)) is not None:
        return str(weights)
    for place in (run, run / MEGATRON_CHECKPOINTS, run / EXPORT):
        try:
            detect_format(place)
        except NotFound:
            continue
        return str(place)
    raise NotFound(
        "this run has no checkpoint and no export yet",
        where=str(run),
        hint=f"`trainshed status {run}` says how it stands",
    )
