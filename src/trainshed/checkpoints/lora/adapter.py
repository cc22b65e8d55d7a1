"""A LoRA adapter as PEFT saves it: read, held against its base, and added to a base tensor exactly as PEFT would.

    adapter_config.json          rank, alpha, which modules
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]

What an adapter may say besides (DoRA, PiSSA, biases, …) changes what merging means, so it is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainshed.checkpoints.hf.safetensors_file import read_header
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.hf_tensors import HfTensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# What says where an adapter came from, which modules it has (its tensors say so too) or how it was trained.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version", "peft_type",
    "target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "layers_to_transform", "lora_dropout",
    "megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "ensure_weight_tying",
})  # fmt: skip
# `fan_in_fan_out` is not asked either: PEFT itself sets it by the kind of the module, and so do we.
_READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights", "fan_in_fan_out"}
)
# Ways to start that leave the base as it is; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract from it.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_FACTOR = re.compile(r"(.*)\.lora_(A|B|embedding_A|embedding_B)(?:\.weight)?")


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter's config says of merging."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base: str | None

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Read the config in an adapter's folder; what cannot be merged is refused by name."""
        where = str(folder / CONFIG)
        try:
            body = json.loads((folder / CONFIG).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"there is no {CONFIG}", where=str(folder), hint="name the folder of an adapter") from None
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise CorruptData("is not a JSON object", where=where, hint="fetch the file again")
        _refuse_the_rest(body, where)
        try:
            return cls(
                rank=int(body.get("r", 8)),
                alpha=float(body.get("lora_alpha", 8)),
                rank_stabilized=bool(body.get("use_rslora")),
                rank_pattern=dict(body.get("rank_pattern") or {}),
                alpha_pattern=dict(body.get("alpha_pattern") or {}),
                base=body.get("base_model_name_or_path"),
            )
        except (TypeError, ValueError):
            raise CorruptData("has a rank or alpha that is no number", where=where, hint="fetch it again") from None

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's factors is multiplied by."""
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, module), self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank

    def rank_of(self, module: str) -> int:
        """The rank that the config gives a module."""
        return self.rank_pattern.get(_pattern(self.rank_pattern, module), self.rank)


class Adapter:
    """An adapter in a folder, held against the tensors of its base: `changes` names those it changes.

    `base` is what transformers saves for the base model, by name.
    """

    def __init__(self, folder: Path, base: Mapping[str, HfTensor]) -> None:
        self.folder, self.config = folder, AdapterConfig.read(folder)
        if not (folder / WEIGHTS).exists():
            raise NotFound(
                f"there is no {WEIGHTS}",
                where=str(folder),
                hint="pickled adapters (.bin) are never opened: save it with save_pretrained",
            )
        self._base = base
        self._stored = read_header(folder / WEIGHTS)
        self._factors: dict[str, dict[str, str]] = {}
        self._replaced: dict[str, str] = {}
        for key in sorted(self._stored):
            self._place(key)
        self._check()

    @property
    def changes(self) -> set[str]:
        """The base tensors that merging changes."""
        return {f"{module}.weight" for module in self._factors} | set(self._replaced)

    @torch.no_grad()
    def merge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a base tensor with the adapter in it, in the tensor's own dtype.

        As PEFT: the product of the factors in float32, turned where the base is, times the scale, added.
        """
        if name in self._replaced:
            tensor = self._read(self._replaced[name]).to(tensor.dtype)
        module = name.removesuffix(".weight")
        if module not in self._factors:
            return tensor
        keys = self._factors[module]
        a, b = (self._read(keys[side]).float() for side in ("A", "B"))
        product = b @ a
        if self._is_turned(module):
            product = product.T
        return tensor.clone().add_(product * self.config.scale(module, a.shape[0]))

    def _place(self, key: str) -> None:
        """Say what a stored tensor is: a factor, or a module that was trained whole."""
        name = key.removeprefix(PREFIX)
        found = _FACTOR.fullmatch(name)
        if found and key.startswith(PREFIX):
            self._factors.setdefault(found[1], {})[found[2].removeprefix("embedding_")] = key
            return
        # PEFT saves an embedding's own weights beside its factors.
        name = name.replace(".base_layer.", ".")
        if not key.startswith(PREFIX) or name not in self._base:
            raise self._error(f"`{key}` has no place in the base model", "name the base that it was trained on")
        self._replaced[name] = key

    def _check(self) -> None:
        """Every factor has its other half, its module is in the base, and the shapes fit."""
        for module, keys in self._factors.items():
            if set(keys) != {"A", "B"}:
                raise self._error(f"`{module}` has only one of its two factors", "fetch or save the adapter again")
            whole = self._base.get(f"{module}.weight")
            if whole is None:
                raise self._error(
                    f"the base has no tensor of its own for `{module}`",
                    "name the base it was trained on; a head that is tied to the embedding is not adapted alone",
                )
            a, b = (self._stored[keys[side]].shape for side in ("A", "B"))
            rows, columns = whole.shape[::-1] if self._is_turned(module) else whole.shape
            rank = self.config.rank_of(module)
            if (a, b) != ((rank, columns), (rows, rank)):
                raise self._error(
                    f"the factors of `{module}` are {list(a)} and {list(b)}, not {[rank, columns]} and {[rows, rank]}",
                    f"the base and the rank in {CONFIG} must be those it was trained with",
                )
        for name, key in self._replaced.items():
            if self._stored[key].shape != self._base[name].shape:
                raise self._error(
                    f"`{key}` is {list(self._stored[key].shape)}, in the base it is {list(self._base[name].shape)}",
                    "resize the base's vocabulary with transformers first",
                )

    def _is_turned(self, module: str) -> bool:
        """Whether factors give the transpose of the base: for GPT-2's [in, out] matrices and for embeddings."""
        embedding = "embedding" in self._factors[module]["A"].rsplit("lora_", 1)[1]
        return embedding or self._base[f"{module}.weight"].strips[0].transposed

    def _read(self, key: str) -> torch.Tensor:
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            return file.get_tensor(key)

    def _error(self, what: str, hint: str) -> InputError:
        return InputError(what, where=str(self.folder), hint=hint)


def _refuse_the_rest(body: dict[str, Any], where: str) -> None:
    """Refuse what is not plain LoRA."""
    if str(body.get("peft_type", "LORA")) != "LORA":
        raise InputError(f"`peft_type: {body['peft_type']}` is not merged", where=where, hint="only LORA is")
    if body.get("bias", "none") != "none":
        raise InputError(
            f"`bias: {body['bias']}` is not merged",
            where=where,
            hint="merge it with PEFT itself (merge_and_unload, save_pretrained)",
        )
    if body.get("init_lora_weights") not in _PLAIN_STARTS:
        raise InputError(
            f"`init_lora_weights: {body['init_lora_weights']}` also changed the base weights",
            where=where,
            hint="turn it into plain LoRA: PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    refused = sorted(key for key, value in body.items() if key not in _HARMLESS | _READ and value)
    if refused:
        shown = ", ".join(f"`{key}: {json.dumps(body[key])}`" for key in refused)
        raise InputError(
            f"{shown}: only plain LoRA is merged",
            where=where,
            hint="merge it with PEFT itself (merge_and_unload, save_pretrained)",
        )


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The pattern that matches the end of a module's name, as PEFT matches it."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)
