"""The model that somebody wants to try: a folder, an address in a store, a run by its folder or by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from trainshed.reporting import Reporter
    from trainshed.serve.loading import LoadedModel
    from trainshed.serve.words import Words


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded, for every verb that asks one.

    Parameters
    ----------
    tokenizer
        A folder with the tokenizer (default: the one beside the weights, else that of their run).
    base
        The weights that a LoRA adapter belongs to (default: what the adapter says).
    dtype
        What to compute in (default: as stored on a GPU, fp32 on a CPU).
    device
        cpu, cuda or cuda:N (default: a GPU if there is one).
    vocab_size
        The true vocabulary of a Megatron checkpoint whose args do not say it.
    eager
        On a GPU, make each step kernel by kernel rather than as a CUDA graph.
    ignore_verdict
        Take weights although the proof of their conversion failed.
    """

    tokenizer: str | None = None
    base: str | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    device: str | None = None
    vocab_size: int | None = None
    eager: Annotated[bool, Parameter(negative="")] = False
    ignore_verdict: Annotated[bool, Parameter(negative="")] = False

    def load(self, checkpoint: str, reporter: Reporter) -> tuple[LoadedModel, Words]:
        """Load what somebody calls `checkpoint`; raises `MissingExtra` where the parts for it are not installed."""
        from trainshed.errors import MissingExtra, TokenizerError

        address = checkpoint_address(checkpoint)
        try:
            from trainshed.serve.loading import load_model
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("torch", "safetensors"):
                raise
            raise MissingExtra.named("serve", "asking a model") from None
        model = load_model(
            address,
            dtype=self.dtype,
            device=self.device,
            tokenizer=self.tokenizer,
            base=self.base,
            vocab_size=self.vocab_size,
            ignore_verdict=self.ignore_verdict,
            reporter=reporter,
        )
        if model.words is None:
            raise TokenizerError(
                "there is no tokenizer beside these weights",
                where=model.address,
                hint="write --tokenizer FOLDER (or hf://org/name)",
            )
        return model, model.words


DEFAULTS = ModelOptions()


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
