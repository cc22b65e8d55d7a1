"""The arguments of one launch, each with the recipe's key that decides it, and `engine.args` added to them.

A setting that equals Megatron's default is kept too (and not written): `engine.args` may not contradict it. An engine
argument must be known to the version, have the right type and contradict nothing. `ARGUMENT_CONFLICTS` are arguments
that Megatron refuses together, or takes and quietly changes (`validate_args` of its arguments.py); the recipe's own
arguments never conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trainshed.engines.keys import EngineSetting
from trainshed.engines.launch import EngineTask
from trainshed.engines.megatron.arguments import RETIRED_ARGUMENTS, KnownArguments, MegatronArgument
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error


class MegatronSettings:
    """All settings of one launch, in the order in which they are written."""

    def __init__(self, known: KnownArguments, settings: Iterable[EngineSetting]) -> None:
        self.known = known
        self._settings = {setting.key: setting for setting in settings}
        for dest in self._settings:
            assert known.has(dest), f"Megatron-LM {known.version} has no argument for {dest}"

    def decided(self, dest: str) -> EngineSetting | None:
        """Return the setting of an argument, None where nothing sets it."""
        return self._settings.get(dest)

    def value(self, dest: str) -> Any:
        """Return what Megatron will take something to be: as decided, or its default."""
        setting = self._settings.get(dest)
        if setting is not None and setting.value is not None:
            return setting.value
        return self.known.default(dest) if self.known.has(dest) else None

    def add(self, setting: EngineSetting) -> None:
        """Add one of `engine.args`."""
        self._settings[setting.key] = setting

    def words(self) -> tuple[str, ...]:
        """Return the command line."""
        return tuple(
            word for setting in self._settings.values() for word in self.known.written(setting.key, setting.value)
        )


def add_engine_args(settings: MegatronSettings, task: EngineTask) -> None:
    """Add the recipe's `engine.args`, or raise one error with all that is wrong with them."""
    problems: list[Problem] = []
    names: dict[str, str] = {}
    for name, value in task.recipe.engine.args.items():
        setting = _engine_arg_setting(settings, name, value)
        if isinstance(setting, Problem):
            problems.append(setting)
        elif setting is not None:
            settings.add(setting)
            names[setting.key] = name
    for dest, needs in find_conflicts(settings):
        name = names.get(dest)
        path = ("engine", "args", name) if name else ("engine", "args")
        problems.append(
            Problem(path, f"Megatron refuses {_written_as(settings, dest)} without {needs}", "delete it, or both")
        )
    if problems:
        raise recipe_error(problems, task.recipe.places)


def option_name(name: str) -> str:
    """Return the option that a key means: `tp-comm-overlap`, `tp_comm_overlap` and `--tp-comm-overlap` are one."""
    return f"--{name.lstrip('-').replace('_', '-')}"


def find_argument(known: KnownArguments, name: str) -> MegatronArgument | None:
    """Return the argument that a key means; some of Megatron's own have an underscore in the middle."""
    exact = f"--{name.lstrip('-')}"
    return known.option(exact) or known.option(option_name(name))


def _engine_arg_setting(settings: MegatronSettings, name: str, value: Any) -> EngineSetting | Problem | None:
    path = ("engine", "args", name)
    argument = find_argument(settings.known, name)
    retired = RETIRED_ARGUMENTS.get(option_name(name))
    if retired is not None and (argument is None or retired.fate in ("ignored", "refused")):
        return Problem(path, f"`{option_name(name)}`: {retired}", "delete it")
    if argument is None:
        near = settings.known.nearest(option_name(name))
        return Problem(
            path,
            f"Megatron-LM {settings.known.version} has no argument `{option_name(name)}`",
            f"did you mean {near.removeprefix('--')}?"
            if near
            else "delete it, or write the engine.version that has it",
        )
    if value is None:
        return None
    read = _read_values(argument, option_name(name), value)
    if isinstance(read, str):
        return Problem(path, f"`{value}` is not what {argument.option} takes", f"write {read}")
    decided = settings.decided(argument.dest)
    if decided is None or decided.decided_by is None:
        return EngineSetting(argument.dest, read[0], "engine.args")
    if decided.value == read[0] or (not decided.value and not read[0]):
        return None
    does = f"says {_written_as(settings, argument.dest)}" if decided.value is not None else "leaves it out"
    return Problem(
        path,
        f"`{argument.option}` contradicts `{decided.decided_by}`, which {does}",
        f"delete it and write `{decided.decided_by}`",
    )


def _written_as(settings: MegatronSettings, dest: str) -> str:
    words = settings.known.written(dest, settings.value(dest))
    return " ".join(words) if words else f"{settings.known.setting(dest)[0].option} as it is by default"


def _read_values(argument: MegatronArgument, option: str, value: Any) -> tuple[Any] | str:
    """Return the value as Megatron's parser would, in a tuple; or what should have been written."""
    if not argument.takes_value:
        if not isinstance(value, bool):
            return "true or false"
        negative = argument.kind == "unflag" or option in argument.also
        return (not value if negative else value,)
    many = isinstance(value, list | tuple)
    if many != (argument.nargs is not None or argument.kind == "ints"):
        return argument.wants
    values = [_read_value(argument, item) for item in (value if many else [value])]
    if any(item is None for item in values) or (isinstance(argument.nargs, int) and len(values) != argument.nargs):
        return argument.wants
    if many and not values and argument.nargs != "*":
        return argument.wants
    return (tuple(values) if many else values[0],)


def _read_value(argument: MegatronArgument, value: Any) -> Any:
    """Return a single value in the argument's type, None where it has another type or is not one of the choices."""
    if isinstance(value, bool):
        return None
    if argument.kind in ("int", "ints"):
        read = value if isinstance(value, int) else None
    elif argument.kind == "float":
        read = float(value) if isinstance(value, int | float) else None
    else:
        read = value if argument.kind == "pattern" and isinstance(value, int) else str(value)
    return None if argument.choices is not None and read not in argument.choices else read


SettingsTest = Callable[[MegatronSettings], bool]


@dataclass(frozen=True)
class ArgumentConflict:
    """An argument that asks for something else: where `broken`, `dest` cannot stay as it is."""

    dest: str
    broken: SettingsTest
    needs: str


def find_conflicts(settings: MegatronSettings) -> Iterator[tuple[str, str]]:
    """Yield each setting that does not go with the others, and what it needs."""
    for conflict in ARGUMENT_CONFLICTS:
        if settings.known.has(conflict.dest) and settings.value(conflict.dest) and conflict.broken(settings):
            yield conflict.dest, conflict.needs


def _without(*dests: str) -> SettingsTest:
    """Broken where none of these is set."""
    return lambda settings: not any(settings.value(dest) for dest in dests)


def _with(*dests: str) -> SettingsTest:
    """Broken where one of these is set."""
    return lambda settings: any(settings.value(dest) for dest in dests)


def _larger(dest: str, number: int) -> SettingsTest:
    return lambda settings: not (settings.value(dest) or 0) > number


def _interleaved(settings: MegatronSettings) -> bool:
    chunks = (settings.value("pipeline_model_parallel_layout") or "").count("|") + 1
    virtual = settings.value("num_virtual_stages_per_pipeline_rank") or 1
    return virtual > 1 or chunks > settings.value("pipeline_model_parallel_size")


ARGUMENT_CONFLICTS: tuple[ArgumentConflict, ...] = (
    ArgumentConflict(
        "overlap_param_gather", _without("use_distributed_optimizer", "use_megatron_fsdp"), "layout.shard: zero1"
    ),
    ArgumentConflict("overlap_param_gather", _without("overlap_grad_reduce"), "--overlap-grad-reduce"),
    ArgumentConflict(
        "overlap_param_gather_with_optimizer_step", lambda _: True, "a checkpoint format other than torch_dist"
    ),
    ArgumentConflict("tp_comm_overlap", _larger("tensor_model_parallel_size", 1), "layout.tp of 2 or more"),
    ArgumentConflict("tp_comm_overlap", _with("deterministic_mode"), "train.deterministic: false"),
    ArgumentConflict("use_flash_attn", _with("deterministic_mode"), "train.deterministic: false"),
    ArgumentConflict("cross_entropy_loss_fusion", _with("deterministic_mode"), "train.deterministic: false"),
    ArgumentConflict("fp8_param_gather", _without("fp8"), "train.precision: fp8"),
    ArgumentConflict(
        "fp8_param_gather", _without("use_distributed_optimizer", "use_megatron_fsdp"), "layout.shard: zero1"
    ),
    ArgumentConflict("first_last_layers_bf16", lambda s: s.value("fp8_recipe") == "delayed", "--fp8-recipe tensorwise"),
    ArgumentConflict("fp16_lm_cross_entropy", _without("fp16"), "train.precision: fp16"),
    ArgumentConflict("fp32_residual_connection", _without("bf16", "fp16"), "train.precision: bf16 or fp16"),
    ArgumentConflict(
        "distribute_saved_activations", lambda _: True, "tensor parallel without sequence parallel, never here"
    ),
    ArgumentConflict(
        "optimizer_cpu_offload", _without("use_precision_aware_optimizer"), "--use-precision-aware-optimizer"
    ),
    ArgumentConflict("use_precision_aware_optimizer", _without("use_distributed_optimizer"), "layout.shard: zero1"),
    ArgumentConflict(
        "cpu_offloading_num_layers", lambda s: s.value("pipeline_model_parallel_size") > 1, "layout.pp: 1"
    ),
    ArgumentConflict("cpu_offloading_num_layers", _with("recompute_granularity"), "layout.recompute: none"),
    ArgumentConflict(
        "overlap_moe_expert_parallel_comm", _larger("expert_model_parallel_size", 1), "layout.ep of 2 or more"
    ),
    ArgumentConflict("overlap_moe_expert_parallel_comm", _with("recompute_granularity"), "layout.recompute: none"),
    ArgumentConflict(
        "overlap_moe_expert_parallel_comm",
        lambda s: s.value("pipeline_model_parallel_size") > 1 and not _interleaved(s),
        "layout.vp of 2 or more",
    ),
    ArgumentConflict("moe_shared_expert_overlap", _without("moe_shared_expert_intermediate_size"), "a shared expert"),
    ArgumentConflict(
        "moe_shared_expert_overlap",
        lambda s: s.value("moe_token_dispatcher_type") != "alltoall",
        "--moe-token-dispatcher-type alltoall",
    ),
    ArgumentConflict("moe_pad_expert_input_to_capacity", _without("moe_expert_capacity_factor"), "a capacity factor"),
    ArgumentConflict(
        "delay_wgrad_compute", _without("overlap_moe_expert_parallel_comm"), "--overlap-moe-expert-parallel-comm"
    ),
    ArgumentConflict(
        "multi_latent_attention", lambda s: s.value("transformer_impl") != "transformer_engine", "TransformerEngine"
    ),
    ArgumentConflict("qk_clip", lambda s: s.value("transformer_impl") != "transformer_engine", "TransformerEngine"),
    ArgumentConflict("sharp_enabled_group", _without("use_sharp"), "SHARP in the fabric of the cluster file"),
    ArgumentConflict(
        "save_retain_interval",
        lambda s: s.value("save_retain_interval") % s.value("save_interval") != 0,
        "a multiple of checkpoint.every",
    ),
    ArgumentConflict(
        "log_memory_interval",
        lambda s: s.value("log_memory_interval") % s.value("log_interval") != 0,
        "a multiple of --log-interval",
    ),
    ArgumentConflict("use_legacy_models", lambda _: True, "the ckpt format `torch`, never written here"),
)
