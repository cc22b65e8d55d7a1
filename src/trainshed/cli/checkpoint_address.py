"""What people write for a checkpoint: a folder, an address in a store, a run by its folder or by its name."""

from __future__ import annotations

from pathlib import Path


def checkpoint_address(text: str) -> str:
    """Return where the weights are that somebody means.

    Of a run that is its newest checkpoint, or its export where an engine of others trained it. A run's name is looked
    for in the store of this machine first, then among what was submitted from here.
    """
    if "://" in text:
        return text
    folder = Path(text).expanduser()
    if folder.is_dir():
        return _of_run(folder) if (folder / "recipe.yaml").is_file() else str(folder)
    return _of_run(_named_run(text))


def _named_run(text: str) -> Path:
    from trainshed.errors import NoSuchName
    from trainshed.launch.submissions import find_submission
    from trainshed.recipe import load_cluster

    runs = Path(load_cluster().store_root).expanduser() / "runs"
    wanted = text.strip().strip("/")
    if wanted.count("/") <= 1 and ".." not in Path(wanted).parts:
        named = [runs / wanted] if "/" in wanted else sorted((runs / wanted).glob("*"), key=_changed)
        found = [each for each in named if (each / "recipe.yaml").is_file()]
        if found:
            return found[-1]
    try:
        submitted = find_submission(text)
    except NoSuchName:
        raise NoSuchName(
            "there is no such folder, and no such run in the store here or among those submitted from here",
            where=text,
            hint="name a folder with weights, hf://org/name, s3://…, or a run (`trainshed ls`)",
        ) from None
    folder = Path(submitted.submitted.run)
    if not folder.is_dir():
        raise NoSuchName(
            f"the run {submitted.run} is on {submitted.cluster.name}, and its folder is not mounted here",
            where=str(folder),
            hint="fetch its export or a checkpoint, or run this command there",
        )
    return folder


def _changed(run: Path) -> float:
    """When a run was last begun or trained on."""
    return max((each.stat().st_mtime for each in (run, run / "checkpoints") if each.exists()), default=0.0)


def _of_run(run: Path) -> str:
    from trainshed.checkpoints.formats import detect
    from trainshed.engines.megatron.keeping import CHECKPOINTS as MEGATRON_CHECKPOINTS
    from trainshed.errors import NotFound

    for place in (run, run / MEGATRON_CHECKPOINTS, run / "export"):
        try:
            detect(place)
        except NotFound:
            continue
        return str(place)
    raise NotFound(
        "this run has no checkpoint and no export yet", where=str(run), hint="`trainshed checkpoints RUN` lists them"
    )
