"""Batch, optimiser, learning rate, precision and layout in Megatron's arguments, as `train` and `layout`."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from trainshed.data.sampling.schedule import BatchSchedule, RampUp
from trainshed.engines.megatron.importing.notebook import Notebook
from trainshed.errors import InputError
from trainshed.recipe.section import read_count

_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}


def read_training(book: Notebook) -> None:
    """Read `train`, with Megatron's defaults for what is not given: they are not ours."""
    parsed = book.parsed
    micro = parsed["micro_batch_size"] or 1
    stepped = _stepped_ramp(book)
    batch = stepped[0] if stepped else parsed["global_batch_size"]
    if batch is None:
        batch = micro
        book.questions.append("train.global_batch: the arguments leave it to the number of GPUs (micro batch · dp)")
    schedule = _read_length(book, batch, stepped[1] if stepped else parsed["rampup_batch_size"])
    book.put("train.global_batch", batch, "global_batch_size")
    book.put("train.precision", _precision(book), "bf16", "fp16", "fp8")
    if parsed["lr"] is None:
        raise InputError("it names no learning rate", where=book.name, hint="add --lr")
    book.put("train.optimizer.lr", parsed["lr"], "lr")
    book.put("train.optimizer.betas", [parsed["adam_beta1"], parsed["adam_beta2"]], "adam_beta1", "adam_beta2")
    book.put("train.optimizer.eps", parsed["adam_eps"], "adam_eps")
    book.put("train.optimizer.weight_decay", parsed["weight_decay"], "weight_decay")
    book.put("train.optimizer.clip", parsed["clip_grad"] or None, "clip_grad")
    if parsed["optimizer"] == "adam":
        book.note("train.optimizer.name: adamw", "optimizer")
    else:
        book.drop("a recipe has adamw", "optimizer")
    _read_schedule(book, schedule)
    _read_dropout(book)
    book.put("seed", parsed["seed"], "seed")
    if parsed["num_experts"]:
        _read_router(book)
    if parsed["deterministic_mode"]:
        book.put("train.deterministic", True, "deterministic_mode")


def _read_dropout(book: Notebook) -> None:
    parsed = book.parsed
    if parsed["use_checkpoint_args"] and not book.given("hidden_dropout", "attention_dropout"):
        return  # restored from the checkpoint; our models have none
    hidden, attention = parsed["hidden_dropout"], parsed["attention_dropout"]
    if hidden != attention:
        book.questions.append(
            f"train.dropout: one number here, and {hidden} (hidden) and {attention} (attention) in the arguments"
        )
    book.put("train.dropout", hidden, "hidden_dropout", "attention_dropout")


def _stepped_ramp(book: Notebook) -> tuple[int, list[int]] | None:
    """Read --step-batch-size-schedule, `TOKENS:BATCH …`, as the full batch and a ramp, where its steps are equal."""
    parsed = book.parsed
    if not parsed["step_batch_size_schedule"]:
        return None
    pairs = [each.split(":") for each in parsed["step_batch_size_schedule"].replace(",", " ").split()]
    sizes = [int(size) for _, size in pairs]
    samples = [read_count(tokens) // (parsed["seq_length"] or 1) for tokens, _ in pairs]
    increments = len(sizes) - 1
    even = increments > 0 and len({after - before for before, after in pairwise(sizes)}) == 1
    if not even or samples != [-(-stage * samples[-1] // increments) for stage in range(increments + 1)]:
        book.questions.append("train.batch_ramp: it grows in equal steps here, and not in the arguments")
        return sizes[-1], []
    book.note("train.batch_ramp", "step_batch_size_schedule")
    return sizes[-1], [sizes[0], sizes[1] - sizes[0], samples[-1]]


def _read_length(book: Notebook, batch: int, ramp: list[int] | None) -> BatchSchedule:
    parsed = book.parsed
    schedule = BatchSchedule(batch, RampUp(*ramp) if ramp else None)
    if ramp:
        book.put(
            "train.batch_ramp", dict(zip(("start", "increment", "samples"), ramp, strict=True)), "rampup_batch_size"
        )
    steps = parsed["train_iters"]
    if steps is None and parsed["train_samples"] is not None:
        steps = schedule.steps_for(parsed["train_samples"])
    if steps is None:
        steps = 1000
        book.questions.append("train.steps: the arguments do not say how long to train")
    book.put("train.steps", steps, "train_iters", "train_samples")
    return schedule


def _precision(book: Notebook) -> str:
    parsed = book.parsed
    if parsed["fp8"] is not None:
        if parsed["fp8"] != "hybrid":
            book.questions.append(f"train.precision: fp8 is hybrid here, and the arguments say {parsed['fp8']}")
        return "fp8"
    return "bf16" if parsed["bf16"] else "fp16" if parsed["fp16"] else "fp32"


def _read_schedule(book: Notebook, batches: BatchSchedule) -> None:
    parsed, steps = book.parsed, book.steps
    assert steps is not None, "the length is read first"

    def in_steps(iterations: str, samples: str) -> int | None:
        return parsed[iterations] or (batches.steps_for(parsed[samples]) if parsed[samples] else None)

    style = parsed["lr_decay_style"]
    name = _STYLES.get(style, "cosine")
    if style not in _STYLES:
        book.questions.append(f"train.schedule: there is no `{style}` schedule; cosine is written in its place")
    book.put("train.schedule.name", name, "lr_decay_style")
    end = in_steps("lr_decay_iters", "lr_decay_samples") or steps
    warmup = in_steps("lr_warmup_iters", "lr_warmup_samples") or 0
    if parsed["lr_warmup_fraction"]:
        warmup = round(parsed["lr_warmup_fraction"] * end)
    book.put(
        "train.schedule.warmup", warmup, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init"
    )
    if name == "wsd":
        book.put("train.schedule.decay", in_steps("lr_wsd_decay_iters", "lr_wsd_decay_samples") or 1)
        if parsed["lr_wsd_decay_style"] != "linear":
            book.drop("the final decay of wsd is linear here", "lr_wsd_decay_style")
        book.note("train.schedule.decay", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style")
        if end != steps:
            book.drop("wsd ends with the run here", "lr_decay_iters", "lr_decay_samples")
    elif name != "constant" and end != steps:
        book.put("train.schedule.decay", end, "lr_decay_iters", "lr_decay_samples")
    if name != "constant":
        book.put("train.schedule.min_lr", parsed["min_lr"], "min_lr")
    book.note(f"train.schedule, which ends with the run ({steps} steps)", "lr_decay_iters", "lr_decay_samples")
    book.drop("a constant rate has no end", "min_lr")


def _read_router(book: Notebook) -> None:
    parsed = book.parsed
    kinds, factors = parsed["moe_router_load_balancing_type"], parsed["moe_aux_loss_coeff"]
    kind = kinds[0] if isinstance(kinds, list) else kinds
    factor = factors[0] if isinstance(factors, list) else factors
    if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        factor = 0.0
    if kind != "seq_aux_loss" and factor:
        book.questions.append(f"train.moe.balance_loss: per sequence here, and {kind} in the arguments")
    losses = {"balance_loss": factor, "z_loss": parsed["moe_z_loss_coeff"] or 0.0}
    book.put("train.moe", losses, "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")


def read_layout(book: Notebook) -> None:
    """Read `layout`; keys that are 1 are left out."""
    parsed = book.parsed
    layout: dict[str, Any] = {}

    def put(key: str, value: Any, usual: Any, *dests: str) -> None:
        if value != usual:
            layout[key] = value
        book.note(f"layout.{key}: {value}", *dests)

    tp, pp = parsed["tensor_model_parallel_size"], parsed["pipeline_model_parallel_size"]
    put("tp", tp, 1, "tensor_model_parallel_size")
    book.note("layout.tp, which has it always", "sequence_parallel")
    put("pp", pp, 1, "pipeline_model_parallel_size")
    put("vp", _virtual(book, pp), 1, "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    put("cp", parsed["context_parallel_size"], 1, "context_parallel_size")
    if parsed["num_experts"]:
        put("ep", parsed["expert_model_parallel_size"], 1, "expert_model_parallel_size")
        put("etp", parsed["expert_tensor_parallel_size"] or tp, 1, "expert_tensor_parallel_size")
    put("micro_batch", parsed["micro_batch_size"] or 1, 1, "micro_batch_size")
    put(
        "shard",
        _shard(book),
        "zero1",
        "use_distributed_optimizer",
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
    )
    put("replicate", parsed["num_distributed_optimizer_instances"], 1, "num_distributed_optimizer_instances")
    recompute = "selective" if parsed["recompute_activations"] else parsed["recompute_granularity"] or "none"
    put("recompute", recompute, "none", "recompute_granularity", "recompute_activations")
    if recompute == "full" and (parsed["recompute_method"], parsed["recompute_num_layers"]) == ("uniform", 1):
        book.note("layout.recompute: full", "recompute_method", "recompute_num_layers")
    else:
        book.drop("full recomputes every layer here", "recompute_method", "recompute_num_layers")
    stages = _stages(book, pp)
    put("stages", stages, None, "pipeline_model_parallel_layout")
    book.note("layout.stages", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    book.recipe["layout"] = layout


def _virtual(book: Notebook, pp: int) -> int:
    parsed = book.parsed
    if parsed["num_virtual_stages_per_pipeline_rank"]:
        return parsed["num_virtual_stages_per_pipeline_rank"]
    if parsed["num_layers_per_virtual_pipeline_stage"] and parsed["num_layers"]:
        return max(1, parsed["num_layers"] // pp // parsed["num_layers_per_virtual_pipeline_stage"])
    written = parsed["pipeline_model_parallel_layout"]
    return len(_unrolled(written).split("|")) // pp if written else 1


def _shard(book: Notebook) -> str:
    parsed = book.parsed
    if parsed["use_megatron_fsdp"]:
        return {"optim_grads": "zero2", "optim_grads_params": "full"}.get(
            parsed["data_parallel_sharding_strategy"], "zero1"
        )
    return "zero1" if parsed["use_distributed_optimizer"] else "none"


def _stages(book: Notebook, pp: int) -> list[int] | None:
    parsed = book.parsed
    written = parsed["pipeline_model_parallel_layout"]
    if written:
        return [chunk.count("t") for chunk in _unrolled(written).split("|")]
    first, last = parsed["decoder_first_pipeline_num_layers"], parsed["decoder_last_pipeline_num_layers"]
    if pp == 1 or (first is None and last is None) or not parsed["num_layers"]:
        return None
    middle = pp - (first is not None) - (last is not None)
    left = parsed["num_layers"] - (first or 0) - (last or 0)
    each = [left // middle] * middle if middle else []
    return [*([] if first is None else [first]), *each, *([] if last is None else [last])]


def _unrolled(layout: str) -> str:
    """Unroll Megatron's shorthand: `Et*3|(tt|)*2L` has four chunks."""
    layout = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), layout)
    return layout
