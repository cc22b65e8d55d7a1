"""What a recipe may ask for that Megatron-LM does not do: refused here, by the recipe's own keys."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.engines.foreign import EngineTask
from trainshed.engines.megatron.model import sequence_length
from trainshed.engines.megatron.parallel import uses_fsdp
from trainshed.engines.megatron.training import run_length
from trainshed.plan.legality import layout_problems
from trainshed.recipe.messages import as_recipe_error
from trainshed.recipe.section import Problem

# TransformerEngine's fp8 GEMMs take rows and columns in multiples of it.
FP8_MULTIPLE = 16


def refuse(task: EngineTask) -> None:
    """Raise one error with everything that Megatron cannot do of a task."""
    problems = [*_training(task), *_data(task), *_checkpoints(task), *_layout(task)]
    if problems:
        raise as_recipe_error(problems, task.recipe.places)


def _training(task: EngineTask) -> Iterator[Problem]:
    train = task.recipe.train
    if train.mode == "finetune":
        yield Problem(
            ("train", "mode"),
            "pretrain_gpt.py has no chat data with loss on the answers",
            "write engine: torch, nemo or torchtune, or `mode: pretrain`",
        )
    if train.lora is not None:
        yield Problem(("train", "lora"), "pretrain_gpt.py trains no adapters", "write engine: torch, nemo or torchtune")
    if train.precision == "fp64":
        yield Problem(("train", "precision"), "Megatron has no fp64", "write fp32, bf16, fp16 or fp8")
    if train.z_loss:
        yield Problem(("train", "z_loss"), "Megatron has no z-loss on the logits", "delete it, or write engine: torch")
    if train.non_finite == "skip" and train.precision != "fp16":
        yield Problem(
            ("train", "non_finite"),
            "Megatron skips a step that is not finite with fp16's loss scale only",
            "write `non_finite: stop`",
        )
    if train.precision == "fp8":
        yield from _fp8(task)


def _fp8(task: EngineTask) -> Iterator[Problem]:
    config, layout = task.config, task.layout
    width = config.ffn if config.moe is None else config.moe.ffn
    ranks = layout.tp if config.moe is None else layout.etp
    cut = {
        "hidden": config.hidden,
        "heads · head_dim / tp": config.heads * config.head_dim // layout.tp,
        "ffn / tp": (width or 0) // ranks,
        "tokens of a micro-batch on a rank": layout.micro_batch * sequence_length(task) // layout.cp // layout.tp,
    }
    for what, size in cut.items():
        if size % FP8_MULTIPLE:
            yield Problem(
                ("train", "precision"),
                f"fp8 products take multiples of {FP8_MULTIPLE}, and {what} is {size}",
                "write `precision: bf16`, or a smaller tp",
            )
            return


def _data(task: EngineTask) -> Iterator[Problem]:
    recipe = task.recipe
    if recipe.data.seed != recipe.seed:
        yield Problem(
            ("data", "seed"),
            f"Megatron has one seed for weights and data, and here are {recipe.seed} and {recipe.data.seed}",
            "write the same number as `seed` and `data.seed`",
        )
    if recipe.data.skip:
        yield Problem(("data", "skip"), "Megatron cannot leave out ranges of samples", "delete it, or engine: torch")
    if recipe.data.stage != "direct":
        yield Problem(
            ("data", "stage"), "Megatron maps the token files where they lie in the store", "write `stage: direct`"
        )


def _checkpoints(task: EngineTask) -> Iterator[Problem]:
    recipe = task.recipe
    if recipe.checkpoint.to is not None:
        yield Problem(
            ("checkpoint", "to"),
            "Megatron writes its checkpoints to a folder of the run that every node sees",
            "delete it; `store` says where runs lie",
        )
    if recipe.checkpoint.keep is not None:
        yield Problem(
            ("checkpoint", "keep"), "Megatron deletes no checkpoints", "delete it, or write `keep: null`: all are kept"
        )
    if recipe.observe.dllogger:
        yield Problem(("observe", "dllogger"), "Megatron writes no DLLogger file", "delete it: its log has the figures")
    if recipe.model.from_ is not None and uses_fsdp(task.layout):
        yield Problem(
            ("layout", "shard"),
            "Megatron's FSDP reads checkpoints of its own format only, and base weights are converted to torch_dist",
            "write `shard: zero1`",
        )


def _layout(task: EngineTask) -> Iterator[Problem]:
    layout, place, recipe = task.layout, task.place, task.recipe
    ranks = place.nodes * place.gpus_per_node
    if layout.world_size != ranks:
        yield Problem(
            ("layout",),
            f"the layout {layout} is for {layout.world_size} GPUs, and there are {place.nodes} nodes of "
            f"{place.gpus_per_node} = {ranks}",
            "plan for as many nodes as there are",
        )
    written = not isinstance(recipe.layout, str) and recipe.layout.stages is not None
    yield from layout_problems(
        layout,
        task.config,
        sequence_length=sequence_length(task),
        batch_sizes=run_length(task).schedule.sizes,
        engine="megatron",
        stages_written=written,
    )
    if layout.cp > 1 and sequence_length(task) % (2 * layout.cp):
        yield Problem(
            ("layout", "cp"),
            f"Megatron cuts a sequence of {sequence_length(task)} into 2 · cp = {2 * layout.cp} equal pieces",
            "write a sequence_length that divides, or a smaller cp",
        )
    if layout.shard == "none" and layout.replicate > 1:
        yield Problem(("layout", "replicate"), "there is nothing to share out with `shard: none`", "delete it")
