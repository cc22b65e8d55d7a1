"""The settings of an adapter as PEFT saves them (`adapter_config.json`), read without torch.

A setting that changes what an adapter means and that is not known here is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshed.errors import CorruptData, InputError, NotFound

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""Of all names in PEFT's files."""
_MERGE_WITH_PEFT = "merge it with PEFT itself (merge_and_unload, save_pretrained)"
# Keys about the origin of an adapter, its modules (its tensors name them too) or its training.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version", "peft_type",
    "target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "layers_to_transform", "lora_dropout",
    "megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "ensure_weight_tying",
})  # fmt: skip
# `fan_in_fan_out` is not used either: like PEFT itself we derive it from the kind of the module.
_READ = frozenset({
    "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights",
    "fan_in_fan_out", "target_parameters", "trainable_token_indices",
})  # fmt: skip
# Initializations that leave the base unchanged; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract from it.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraAdapterConfig:
    """The settings of an adapter that matter for what it computes."""

    rank: int
    alpha: float
    rank_stabilized: bool
    dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_parameters: tuple[str, ...]
    base: str | None
    revision: str | None
    trained_tokens: Mapping[str, tuple[int, ...]]
    """The tokens whose rows were trained (`trainable_token_indices`), by the end of the module's name."""

    @classmethod
    def read(cls, folder: Path) -> LoraAdapterConfig:
        """Read the config in an adapter's folder; a setting that is not known here is refused by name."""
        where = str(folder / ADAPTER_CONFIG)
        try:
            body = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        except FileNotFoundError:
            raise NotFound(
                f"there is no {ADAPTER_CONFIG}", where=str(folder), hint="name the folder of an adapter"
            ) from None
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise CorruptData("is not a JSON object", where=where, hint="fetch the file again")
        _refuse_unsupported(body, where)
        try:
            return cls(
                rank=int(body.get("r", 8)),
                alpha=float(body.get("lora_alpha", 8)),
                rank_stabilized=bool(body.get("use_rslora")),
                dora=bool(body.get("use_dora")),
                rank_pattern=dict(body.get("rank_pattern") or {}),
                alpha_pattern=dict(body.get("alpha_pattern") or {}),
                target_parameters=tuple(body.get("target_parameters") or ()),
                base=body.get("base_model_name_or_path"),
                revision=body.get("revision"),
                trained_tokens=_trained_tokens(body.get("trainable_token_indices")),
            )
        except (TypeError, ValueError):
            raise CorruptData(
                "has a rank, alpha or token that is not a number", where=where, hint="fetch it again"
            ) from None

    def scale(self, module: str, rank: int) -> float:
        """Return the factor for the product of a module's factors."""
        alpha = self.alpha_pattern.get(_matching_pattern(self.alpha_pattern, module), self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return self.rank_pattern.get(_matching_pattern(self.rank_pattern, module), self.rank)


def _trained_tokens(written: Any) -> dict[str, tuple[int, ...]]:
    """Return the trained tokens by module; a list without one is of the input embedding, which has several names."""
    by_module = written if isinstance(written, dict) else {"": written}
    return {str(module): tuple(int(id) for id in ids) for module, ids in by_module.items() if ids}


def _refuse_unsupported(body: dict[str, Any], where: str) -> None:
    """Refuse what is neither plain LoRA nor DoRA."""
    if str(body.get("peft_type", "LORA")) != "LORA":
        raise InputError(f"`peft_type: {body['peft_type']}` is not read", where=where, hint="only LORA is")
    if body.get("bias", "none") != "none":
        raise InputError(f"`bias: {body['bias']}` is not read", where=where, hint=_MERGE_WITH_PEFT)
    if body.get("init_lora_weights") not in _PLAIN_INITS:
        raise InputError(
            f"`init_lora_weights: {body['init_lora_weights']}` also changed the base weights",
            where=where,
            hint="turn it into plain LoRA: PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    refused = sorted(key for key, value in body.items() if key not in _HARMLESS | _READ and value)
    if refused:
        shown = ", ".join(f"`{key}: {json.dumps(body[key])}`" for key in refused)
        raise InputError(f"{shown}: only LoRA and DoRA are read", where=where, hint=_MERGE_WITH_PEFT)


def _matching_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """Return the pattern that matches the end of a module's name, as in PEFT."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)
