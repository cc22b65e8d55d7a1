"""The model that somebody wants to try: a folder, an address in a store, a run by its folder or by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trainshed.cli.asked_run import find_run

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
    on
        The cluster file whose store is looked through for the name of a run.
    """

    tokenizer: str | None = None
    base: str | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    device: str | None = None
    vocab_size: int | None = None
    eager: Annotated[bool, Parameter(negative="")] = False
    ignore_verdict: Annotated[bool, Parameter(negative="")] = False
    on: str = "local"

    def load(self, checkpoint: str, reporter: Reporter) -> tuple[LoadedModel, Words]:
        """Load what somebody calls `checkpoint`; raises `MissingExtra` where the parts for it are not installed."""
        from trainshed.errors import MissingExtra, TokenizerError

        address = checkpoint_address(checkpoint, self.on)
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


def checkpoint_address(text: str, on: str = "local") -> str:
    """Return where the weights are that somebody means: a folder of weights, or a run as `find_run` finds it.

    Of a run that is its newest checkpoint, or its export where an engine of others trained it.
    """
    if "://" in text:
        return text
    folder = Path(text).expanduser()
    if folder.is_dir() and not (folder / "recipe.yaml").is_file() and _has_weights(folder):
        return str(folder)
    run = find_run(text, on=on).folder_here()
    # A folder that is neither weights nor a run is named in what its reader says.
    return _of_run(run) if (run / "recipe.yaml").is_file() else str(run)


def _has_weights(folder: Path) -> bool:
    """Whether a folder holds weights, or an adapter to some."""
    from trainshed.checkpoints.formats import detect
    from trainshed.checkpoints.lora.adapter import CONFIG
    from trainshed.errors import TrainshedError

    try:
        detect(folder)
    except TrainshedError:
        return (folder / CONFIG).is_file()
    return True


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
        "this run has no checkpoint and no export yet",
        where=str(run),
        hint=f"`trainshed status {run}` says how it stands",
    )
