"""The arguments that Megatron-LM knows, per version, those it has retired, and a command line parsed by them.

`arguments.json` holds those of all versions, read from their own parsers; an argument that not all have says from which
version (`since`) and up to which (`until`) it is so. An argument is looked up by its option (`--lr`) or by the name of
what it sets (`lr`; argparse calls it dest). Several options may set one thing: `--disable-bias-linear` sets
`add_bias_linear` to false. Where versions call one thing by two names, it has the newer one here (`_NEWER_NAMES`).

Sources of the retired ones: `validate_args` and the `*_deprecated` arguments of arguments.py at core_v0.16.1 and
d98e8a64dd; for those that are gone, the difference of the two lists and older release notes.
"""

from __future__ import annotations

import difflib
import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainshed.errors import InputError

ArgumentKind = Literal["flag", "unflag", "switch", "int", "float", "text", "ints", "pattern"]
"""flag: its presence means true; unflag: false; switch: `--x` or `--no-x`; ints: whole numbers joined by commas;
pattern: a whole number, or a Python list of 0 and 1 that Megatron evaluates.
"""

KNOWN_VERSIONS = ("0.12.3", "878d65f", "0.14.0", "0.16.1", "0.19.0", "head")
"""Versions whose arguments are known, oldest first. 878d65f is a commit on the way to 0.14, which Azure's image has."""
DEFAULT_VERSION = "0.16.1"
"""The version of a recipe that names none: a release, and the newest that Python 3.11 can install. Its arguments do not
change when a newer version becomes known here."""
# What 0.16 gave other names, by the older one.
_NEWER_NAMES = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}


@dataclass(frozen=True)
class MegatronArgument:
    """One argument of a version."""

    option: str
    dest: str
    kind: ArgumentKind
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    also: tuple[str, ...] = ()
    """Other spellings; of a switch, the one that turns it off."""

    @property
    def takes_value(self) -> bool:
        """Whether something must follow it."""
        return self.kind not in ("flag", "unflag", "switch")

    @property
    def wants(self) -> str:
        """What must follow, in words."""
        one = {
            "int": "a whole number",
            "float": "a number",
            "text": "text",
            "ints": "whole numbers joined by commas",
            "pattern": "a whole number or a pattern",
        }
        if not self.takes_value:
            return "true or false"
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.nargs is None:
            return one[self.kind]
        return f"a list of {self.nargs} of them: {one[self.kind]}" if self.nargs == 3 else f"a list: {one[self.kind]}"


class KnownArguments:
    """All arguments of one version."""

    def __init__(self, version: str, source: str, arguments: Sequence[MegatronArgument]) -> None:
        self.version, self.source = version, source
        self.arguments = tuple(arguments)
        self._by_option = {option: argument for argument in arguments for option in (argument.option, *argument.also)}
        self._by_dest: dict[str, list[MegatronArgument]] = {}
        for argument in arguments:
            self._by_dest.setdefault(argument.dest, []).append(argument)

    def option(self, option: str) -> MegatronArgument | None:
        """Return an argument by one of its spellings, `--lr`; None where this version has none such."""
        return self._by_option.get(option)

    def has(self, dest: str) -> bool:
        """Whether anything sets `dest` in this version."""
        return dest in self._by_dest

    def setting(self, dest: str) -> tuple[MegatronArgument, ...]:
        """Return the arguments that set `dest`."""
        return tuple(self._by_dest[dest])

    def default(self, dest: str) -> Any:
        """Return what `dest` is where no argument sets it."""
        return self._by_dest[dest][0].default

    def accepts(self, dest: str, value: Any) -> bool:
        """Whether a value is one that `dest` may have; arguments without a list of choices take any."""
        choices = next((argument.choices for argument in self._by_dest[dest] if argument.choices), None)
        values = value if isinstance(value, tuple | list) else (value,)
        return value is None or choices is None or all(item in choices for item in values)

    def written(self, dest: str, value: Any) -> tuple[str, ...]:
        """Return the words that set `dest` to a value; none where it is None, or a flag as it is anyway."""
        arguments = self._by_dest[dest]
        if value is None:
            return ()
        if isinstance(value, bool):
            return self._flag(dest, arguments, value)
        argument = next(argument for argument in arguments if argument.takes_value)
        if argument.nargs is not None:
            return (argument.option, *map(_word, value if isinstance(value, tuple | list) else [value]))
        if argument.kind == "ints":
            return (argument.option, ",".join(map(str, value)))
        text = _word(value)
        # argparse takes a word that begins with a dash for an option, unless it is a negative number.
        if text.startswith("-") and not isinstance(value, int | float):
            return (f"{argument.option}={text}",)
        return (argument.option, text)

    def _flag(self, dest: str, arguments: list[MegatronArgument], value: bool) -> tuple[str, ...]:
        if value == bool(arguments[0].default):
            return ()
        for argument in arguments:
            if argument.kind == "switch":
                return (argument.option if value else argument.also[0],)
            if argument.kind == ("flag" if value else "unflag"):
                return (argument.option,)
        raise AssertionError(f"no argument of Megatron-LM {self.version} makes {dest} {value}")

    def nearest(self, option: str) -> str | None:
        """Return the known option that was probably meant."""
        near = difflib.get_close_matches(option, self._by_option, n=1, cutoff=0.6)
        return near[0] if near else None


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


@cache
def known_arguments(version: str) -> KnownArguments:
    """Return the arguments of a version."""
    if version not in KNOWN_VERSIONS:
        raise InputError(
            f"the arguments of Megatron-LM {version} are not known here",
            hint=f"write engine.version: {' or '.join(KNOWN_VERSIONS)} (the nearest to what the image has)",
        )
    document = _argument_document()
    variants = (
        (option, fields)
        for option, one_or_more in document["arguments"].items()
        for fields in (one_or_more if isinstance(one_or_more, list) else [one_or_more])
        if _is_in(version, fields)
    )
    return KnownArguments(
        version,
        document["versions"][version],
        [
            MegatronArgument(
                option,
                _NEWER_NAMES.get(fields["dest"], fields["dest"]),
                fields["kind"],
                fields.get("nargs"),
                tuple(fields["choices"]) if "choices" in fields else None,
                fields.get("default"),
                tuple(fields.get("also", ())),
            )
            for option, fields in variants
        ],
    )


@cache
def _argument_document() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("arguments.json").read_text(encoding="utf-8"))


def _is_in(version: str, fields: dict[str, Any]) -> bool:
    since, until = fields.get("since", KNOWN_VERSIONS[0]), fields.get("until", KNOWN_VERSIONS[-1])
    return KNOWN_VERSIONS.index(since) <= KNOWN_VERSIONS.index(version) <= KNOWN_VERSIONS.index(until)


def versions_with(dest: str) -> tuple[str, ...]:
    """Return the versions in which something sets `dest`, oldest first."""
    return tuple(version for version in KNOWN_VERSIONS if known_arguments(version).has(dest))


@dataclass(frozen=True)
class RetiredArgument:
    """What became of an argument."""

    fate: Literal["ignored", "refused", "renamed", "gone"]
    instead: str
    """What to write; empty: nothing, it is so anyway."""

    def __str__(self) -> str:
        says = {
            "ignored": "Megatron takes it and ignores it",
            "refused": "Megatron stops with an error",
            "renamed": "Megatron calls it otherwise today",
            "gone": "newer versions of Megatron have it no more",
        }[self.fate]
        return f"{says}: {self.instead}" if self.instead else says


def _retired(fate: Literal["ignored", "refused", "renamed", "gone"], **instead: str) -> dict[str, RetiredArgument]:
    return {f"--{name.replace('_', '-')}": RetiredArgument(fate, text) for name, text in instead.items()}


RETIRED_ARGUMENTS: dict[str, RetiredArgument] = {
    **_retired(
        "refused",
        batch_size="--micro-batch-size",
        warmup="--lr-warmup-fraction",
        model_parallel_size="--tensor-model-parallel-size",
        checkpoint_activations="--recompute-granularity",
    ),
    **_retired(
        "ignored",
        use_mcore_models="",
        use_dist_ckpt="--ckpt-format says it",
        dist_ckpt_format="--ckpt-format says it",
        ckpt_fully_parallel_save="it is on; --no-ckpt-fully-parallel-save turns it off",
        fp8_interval="",
    ),
    **_retired(
        "renamed",
        use_rotary_position_embeddings="--position-embedding-type rope",
        recompute_activations="--recompute-granularity selective",
        enable_cuda_graph="--cuda-graph-impl local",
        external_cuda_graph="--cuda-graph-impl transformer_engine",
        cuda_graph_scope="--cuda-graph-modules (from 0.17 on)",
        moe_enable_deepep="--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        moe_deepep_num_sms="--moe-flex-dispatcher-num-sms (from 0.17 on)",
        moe_hybridep_num_sms="--moe-flex-dispatcher-num-sms (from 0.17 on)",
        no_weight_decay_cond_type="--apply-wd-to-qk-layernorm",
        moe_layer_recompute="--recompute-modules moe",
        moe_router_padding_for_fp8="--moe-router-padding-for-quantization",
        hybrid_override_pattern="--hybrid-layer-pattern (from 0.17 on)",
        no_position_embedding="--position-embedding-type",
        persistent_save_interval="--save-interval",
    ),
    **_retired(
        "gone",
        use_legacy_models="",
        legacy_tokenizer="",
        moe_extended_tp="--expert-tensor-parallel-size",
        moe_use_legacy_grouped_gemm="--moe-grouped-gemm",
        no_async_tensor_model_parallel_allreduce="",
        no_scatter_gather_tensors_in_pipeline="",
        hybrid_attention_ratio="--hybrid-layer-pattern",
        hybrid_mlp_ratio="--hybrid-layer-pattern",
        tiktoken_special_tokens="--tokenizer-special-tokens",
        tokenizer_hf_use_fast="--tokenizer-hf-no-use-fast is the other way round",
        tokenizer_hf_include_special_tokens="--tokenizer-hf-no-include-special-tokens is the other way round",
        inference_max_batch_size="--inference-max-requests",
        muon_use_nesterov="--muon-nesterov",
        standalone_embedding_stage="--account-for-embedding-in-pipeline-split",
        pipeline_model_parallel_split_rank="",
        encoder_tensor_model_parallel_size="",
        encoder_pipeline_model_parallel_size="",
        use_custom_fsdp="--use-megatron-fsdp",
        s3_cache_path="--object-storage-cache-path",
    ),
}


@dataclass
class ParsedArguments:
    """The arguments of one training."""

    known: KnownArguments
    given: dict[str, Any] = field(default_factory=dict)
    """Values by dest, of the arguments that are there."""
    written: dict[str, str] = field(default_factory=dict)
    """The same as they are written: `--lr 1e-5`."""
    retired: dict[str, RetiredArgument] = field(default_factory=dict)
    """By how they are written."""
    unknown: dict[str, str | None] = field(default_factory=dict)
    """As they are written, with the option that was probably meant."""
    open: dict[str, str] = field(default_factory=dict)
    """Dests whose value only a running shell knows, as they are written."""

    def __getitem__(self, dest: str) -> Any:
        """Return what Megatron takes something to be, given or not."""
        if dest in self.given:
            return self.given[dest]
        return self.known.default(dest) if self.known.has(dest) else None

    def namespace(self) -> Namespace:
        """Return everything, defaults included, as Megatron's program would see it."""
        every = {argument.dest: argument.default for argument in reversed(self.known.arguments)}
        return Namespace(**every | self.given)


def parse_arguments(words: Sequence[str], name: str) -> ParsedArguments:
    """Parse with the version that knows most of the arguments: the default one, where others know no more."""
    preferred = (DEFAULT_VERSION, *reversed(KNOWN_VERSIONS))
    lists = [known_arguments(version) for version in dict.fromkeys(preferred)]
    options = {word.partition("=")[0] for word in words if word.startswith("--")} - set(RETIRED_ARGUMENTS)
    lists.sort(key=lambda known: sum(known.option(option) is None for option in options))
    parsed = ParsedArguments(lists[0])
    left = list(words)
    while left:
        _parse_next(parsed, left, lists, name)
    return parsed


def _parse_next(parsed: ParsedArguments, left: list[str], lists: list[KnownArguments], name: str) -> None:
    option, sign, value = left.pop(0).partition("=")
    values = [value] if sign else []
    if not option.startswith("--"):
        if option.startswith(("$", "-", "\\")) or not option.strip():
            return  # "$@", or a short option of another program
        raise InputError(f"`{option}` belongs to no argument", where=name, hint="quote a value that has blanks in it")
    while not sign and left and not left[0].startswith("--"):
        values.append(left.pop(0))
    written = " ".join([option, *values])
    argument = next(filter(None, (known.option(option) for known in lists)), None)
    if option in RETIRED_ARGUMENTS:
        parsed.retired[written] = RETIRED_ARGUMENTS[option]
    if argument is None:
        if option not in RETIRED_ARGUMENTS:
            parsed.unknown[written] = parsed.known.nearest(option)
        return
    parsed.written[argument.dest] = written
    if any("$" in value for value in values):
        parsed.open[argument.dest] = written
        if argument.kind != "text":
            return
    parsed.given[argument.dest] = _parse_values(argument, option, values, written, name)


def _parse_values(argument: MegatronArgument, option: str, values: list[str], written: str, name: str) -> Any:
    if not argument.takes_value:
        if values:
            raise InputError(f"`{written}`: {option} takes no value", where=name, hint=f"write {option} alone")
        return not (argument.kind == "unflag" or (argument.kind == "switch" and option in argument.also))
    try:
        read = [_parse_value(argument, value) for value in values]
    except ValueError:
        read = []
    if not read or (argument.nargs is None and len(read) != 1):
        if argument.nargs == "*" and not values:
            return None
        raise InputError(f"`{written}`: {option} takes {argument.wants}", where=name, hint="correct it")
    return read[0] if argument.nargs is None else read


def _parse_value(argument: MegatronArgument, text: str) -> Any:
    if argument.kind == "int":
        value: Any = int(text)
    elif argument.kind == "float":
        value = float(text)
    elif argument.kind == "ints":
        return tuple(int(part) for part in text.strip("()").split(","))
    elif argument.kind == "pattern":
        value = int(text) if text.isdigit() else text
    else:
        value = text
    if argument.choices is not None and value not in argument.choices:
        raise ValueError(text)
    return value
