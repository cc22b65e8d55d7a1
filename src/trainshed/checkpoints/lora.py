"""LoRA adapters as PEFT saves them: read, written, and merged into Hugging Face weights exactly as PEFT would.

    adapter_config.json          rank, alpha, which modules
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]

What else an adapter may contain (DoRA, PiSSA, biases, …) changes what merging means, so it is refused by name.

A merge goes shard by shard, in the memory of one tensor: a shard is copied and the tensors that the adapter changes
are overwritten in place, so names, order and dtypes stay those of the base. The result appears when it is complete;
killed before that, the same command continues.

`write_adapter` writes factors by native name for PEFT and vLLM. A native tensor may hold several of Hugging Face's
(queries, keys and values; gate and up): each of them gets the whole of A and its own rows of B, which is the same
update.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trainshed.checkpoints.base import HF_EXCLUDE, HF_INCLUDE, KIND
from trainshed.checkpoints.convert.target import ConversionFolder, hash_file
from trainshed.checkpoints.hf.weights import HfWeights, SafetensorsEntry, read_safetensors_header
from trainshed.checkpoints.prove.verdict import VERDICT
from trainshed.checkpoints.weights import OutputFile
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.families import HF_FAMILIES
from trainshed.models.hf_tensors import HfTensor, hf_names, hf_row_mappings, hf_tensors
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage import FileEntry, LocalStore, Manifest
from trainshed.storage.listing import is_selected
from trainshed.storage.manifest import MANIFEST

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
# Keys about the origin of an adapter, its modules (its tensors name them too) or its training.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version", "peft_type",
    "target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "layers_to_transform", "lora_dropout",
    "megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "ensure_weight_tying",
})  # fmt: skip
# `fan_in_fan_out` is not used either: like PEFT itself we derive it from the kind of the module.
_READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights", "fan_in_fan_out"}
)
# Initializations that leave the base unchanged; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract from it.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_FACTOR = re.compile(r"(.*)\.lora_(A|B|embedding_A|embedding_B)(?:\.weight)?")


@dataclass(frozen=True)
class LoraAdapterConfig:
    """The settings of an adapter that matter for merging."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base: str | None

    @classmethod
    def read(cls, folder: Path) -> LoraAdapterConfig:
        """Read the config in an adapter's folder; a setting that cannot be merged is refused by name."""
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
                rank_pattern=dict(body.get("rank_pattern") or {}),
                alpha_pattern=dict(body.get("alpha_pattern") or {}),
                base=body.get("base_model_name_or_path"),
            )
        except (TypeError, ValueError):
            raise CorruptData("has a rank or alpha that is no number", where=where, hint="fetch it again") from None

    def scale(self, module: str, rank: int) -> float:
        """Return the factor for the product of a module's factors."""
        alpha = self.alpha_pattern.get(_matching_pattern(self.alpha_pattern, module), self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return self.rank_pattern.get(_matching_pattern(self.rank_pattern, module), self.rank)


class LoraAdapter:
    """An adapter in a folder, checked against the tensors of its base; `changed_tensors` are those it changes.

    `base` is what transformers saves for the base model, by name.
    """

    def __init__(self, folder: Path, base: Mapping[str, HfTensor]) -> None:
        self.folder, self.config = folder, LoraAdapterConfig.read(folder)
        if not (folder / ADAPTER_WEIGHTS).exists():
            raise NotFound(
                f"there is no {ADAPTER_WEIGHTS}",
                where=str(folder),
                hint="pickled adapters (.bin) are never opened: save it with save_pretrained",
            )
        self._base = base
        self._stored = read_safetensors_header(folder / ADAPTER_WEIGHTS)
        self._factors: dict[str, dict[str, str]] = {}
        self._replaced: dict[str, str] = {}
        for key in sorted(self._stored):
            self._classify(key)
        self._check()

    @property
    def changed_tensors(self) -> set[str]:
        """The base tensors that merging changes."""
        return {f"{module}.weight" for module in self._factors} | set(self._replaced)

    @torch.no_grad()
    def merge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a base tensor with the adapter in it, in the tensor's own dtype.

        Like PEFT it adds scale · (B @ A), computed in float32 and transposed where the base is.
        """
        if name in self._replaced:
            tensor = self._read(self._replaced[name]).to(tensor.dtype)
        module = name.removesuffix(".weight")
        if module not in self._factors:
            return tensor
        keys = self._factors[module]
        a, b = (self._read(keys[side]).float() for side in ("A", "B"))
        product = b @ a
        if self._is_transposed(module):
            product = product.T
        return tensor.clone().add_(product * self.config.scale(module, a.shape[0]))

    def _classify(self, key: str) -> None:
        """Classify a stored tensor: it is a factor, or a tensor that replaces one of the base."""
        name = key.removeprefix(ADAPTER_PREFIX)
        match = _FACTOR.fullmatch(name)
        if match and key.startswith(ADAPTER_PREFIX):
            self._factors.setdefault(match[1], {})[match[2].removeprefix("embedding_")] = key
            return
        # PEFT saves an embedding's own weights beside its factors.
        name = name.replace(".base_layer.", ".")
        if not key.startswith(ADAPTER_PREFIX) or name not in self._base:
            raise self._error(f"`{key}` has no place in the base model", "name the base that it was trained on")
        self._replaced[name] = key

    def _check(self) -> None:
        """Check that factors come in pairs, that their modules are in the base, and that the shapes fit."""
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
            rows, columns = whole.shape[::-1] if self._is_transposed(module) else whole.shape
            rank = self.config.rank_of(module)
            if (a, b) != ((rank, columns), (rows, rank)):
                raise self._error(
                    f"the factors of `{module}` are {list(a)} and {list(b)}, not {[rank, columns]} and {[rows, rank]}",
                    f"the base and the rank in {ADAPTER_CONFIG} must be those it was trained with",
                )
        for name, key in self._replaced.items():
            if self._stored[key].shape != self._base[name].shape:
                raise self._error(
                    f"`{key}` is {list(self._stored[key].shape)}, in the base it is {list(self._base[name].shape)}",
                    "resize the base's vocabulary with transformers first",
                )

    def _is_transposed(self, module: str) -> bool:
        """Whether B @ A is the transpose of the base tensor: for GPT-2's [in, out] matrices and for embeddings."""
        embedding = "embedding" in self._factors[module]["A"].rsplit("lora_", 1)[1]
        return embedding or self._base[f"{module}.weight"].row_mappings[0].transposed

    def _read(self, key: str) -> torch.Tensor:
        with safe_open(self.folder / ADAPTER_WEIGHTS, framework="pt") as file:
            return file.get_tensor(key)

    def _error(self, what: str, hint: str) -> InputError:
        return InputError(what, where=str(self.folder), hint=hint)


def _refuse_unsupported(body: dict[str, Any], where: str) -> None:
    """Refuse what is not plain LoRA."""
    if str(body.get("peft_type", "LORA")) != "LORA":
        raise InputError(f"`peft_type: {body['peft_type']}` is not merged", where=where, hint="only LORA is")
    if body.get("bias", "none") != "none":
        raise InputError(
            f"`bias: {body['bias']}` is not merged",
            where=where,
            hint="merge it with PEFT itself (merge_and_unload, save_pretrained)",
        )
    if body.get("init_lora_weights") not in _PLAIN_INITS:
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


def _matching_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """Return the pattern that matches the end of a module's name, as in PEFT."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


@dataclass(frozen=True)
class LoraFactors:
    """The update of one native tensor [rows, columns] is b @ a · scale: `a` is [rank, columns], `b` [rows, rank]."""

    a: torch.Tensor
    b: torch.Tensor


def write_adapter(
    folder: Path,
    config: ModelConfig,
    factors: Mapping[str, LoraFactors],
    *,
    alpha: float,
    rank_stabilized: bool = False,
    base: str | None = None,
) -> None:
    """Write factors, by native name, as a PEFT adapter; `base` is the model PEFT should load it onto."""
    rank = _common_rank(config, factors)
    table = {factor.name: factor for factor in parameters(config)}
    tensors: dict[str, torch.Tensor] = {}
    fan_in_fan_out = False
    for name, factor in factors.items():
        modules, transposed = _split_factors(config, table[name], factor)
        fan_in_fan_out = fan_in_fan_out or transposed
        for module, b in modules.items():
            tensors[f"{ADAPTER_PREFIX}{module}.lora_A.weight"] = factor.a.contiguous().clone()
            tensors[f"{ADAPTER_PREFIX}{module}.lora_B.weight"] = b.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    body = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rank_stabilized,
        "target_modules": _target_modules(config, tensors),
        "fan_in_fan_out": fan_in_fan_out,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")


def _common_rank(config: ModelConfig, factors: Mapping[str, LoraFactors]) -> int:
    """Return the one rank of all factors, after checking each against its tensor."""
    table = {factor.name: factor for factor in parameters(config)}
    ranks = {factor.a.shape[0] for factor in factors.values()}
    if len(ranks) != 1:
        raise InputError(f"factors of ranks {sorted(ranks)}", hint="give all factors one rank, and at least one factor")
    (rank,) = ranks
    for name, factor in factors.items():
        parameter = table.get(name)
        if parameter is None or parameter.expert or len(parameter.shape) != 2 or name.startswith(("embedding", "pos")):
            raise InputError(
                f"`{name}` cannot be exported as an adapter",
                hint="matrices of attention, feed-forward and head can; experts, embeddings and norms cannot",
            )
        rows, columns = parameter.shape
        if (tuple(factor.a.shape), tuple(factor.b.shape)) != ((rank, columns), (rows, rank)):
            raise InputError(
                f"the factors of `{name}` are {list(factor.a.shape)} and {list(factor.b.shape)}, not "
                f"{[rank, columns]} and {[rows, rank]}"
            )
    return rank


def _split_factors(
    config: ModelConfig, parameter: Parameter, factors: LoraFactors
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the rows of B by Hugging Face module, and whether the matrices of these modules are [in, out]."""
    parts: dict[str, list[torch.Tensor]] = {}
    mappings = hf_row_mappings(config, parameter)
    for mapping in mappings:
        native_rows = mapping.native_rows(0, mapping.rows)
        rows = factors.b[native_rows] if isinstance(native_rows, slice) else factors.b[torch.from_numpy(native_rows)]
        parts.setdefault(mapping.hf_name.removesuffix(".weight"), []).append(rows)
    return {module: torch.cat(rows) for module, rows in parts.items()}, mappings[0].transposed


def _target_modules(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the adapted modules: by the end of a name where all modules with it are adapted, otherwise in full."""
    adapted = {key.removeprefix(ADAPTER_PREFIX).rsplit(".lora_", 1)[0] for key in tensors}
    all_modules = {name.removesuffix(".weight") for name in hf_names(config) if name.endswith(".weight")}
    targets: set[str] = set()
    for module in adapted:
        ending = module.rsplit(".", 1)[-1]
        alike = {other for other in all_modules if other.rsplit(".", 1)[-1] == ending}
        targets.add(ending if alike <= adapted else module)
    return sorted(targets)


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge."""

    base: str
    adapter: str
    target: str
    family: str
    tensors: int
    changed: int
    rank: int
    files: int
    bytes: int

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def merge_adapter(base: Path, adapter: Path, target: Path, *, reporter: Reporter = SILENT) -> MergeResult:
    """Merge the adapter in one folder into the weights in another, and write the result to a new folder."""
    target = Path(os.path.abspath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError("there is something already", where=str(target), hint="choose another folder, or remove it")
    folder = ConversionFolder(target.with_name(f".{target.name}.merging"))
    with HfWeights(base) as weights, folder.locked():
        tensors = {tensor.name: tensor for tensor in hf_tensors(weights.config)}
        added = LoraAdapter(adapter, tensors)
        _refuse_tied(weights, added)
        shards = _shards_by_file(weights)
        folder.start(_fingerprint(base, adapter, shards))
        entries = _write_shards(folder, shards, weights, added, reporter)
        for info in LocalStore(base).list():
            copied = is_selected(info.path, HF_INCLUDE, HF_EXCLUDE) and not info.path.endswith(".safetensors")
            if copied and info.path != VERDICT:
                shutil.copyfile(base / info.path, folder.target / info.path)
                entries.append(hash_file(folder.target, info.path))
        HfWeights(folder.target).close()
        spec = {"from": os.path.abspath(base), "adapter": os.path.abspath(adapter)}
        facts = {"family": weights.config.family, "parameters": weights.parameter_count, "dtypes": weights.dtypes}
        manifest = Manifest.of(KIND, spec, entries, facts)
        manifest.write(LocalStore(folder.target), MANIFEST)
        folder.publish(target)
        return MergeResult(
            base=spec["from"],
            adapter=spec["adapter"],
            target=str(target),
            family=weights.config.family,
            tensors=len(tensors),
            changed=len(added.changed_tensors),
            rank=added.config.rank,
            files=len(manifest.files),
            bytes=manifest.total_bytes,
        )


def _refuse_tied(weights: HfWeights, adapter: LoraAdapter) -> None:
    embedding = HF_FAMILIES[weights.config.family].names.tensors["embedding"][0] + ".weight"
    if weights.config.tied_embeddings and embedding in adapter.changed_tensors:
        raise InputError(
            f"the adapter changes `{embedding}`, which is the head of this model too, and PEFT changed it only as one",
            where=str(adapter.folder),
            hint="untie them first: save the base with transformers under `tie_word_embeddings: false`",
        )


def _shards_by_file(weights: HfWeights) -> dict[Path, list[tuple[str, SafetensorsEntry]]]:
    """Return the files of the base, each with its tensors."""
    shards: dict[Path, list[tuple[str, SafetensorsEntry]]] = {}
    for name, stored in weights.entries.items():
        shards.setdefault(stored.file, []).append((name, stored))
    return dict(sorted(shards.items()))


def _fingerprint(base: Path, adapter: Path, shards: dict[Path, Any]) -> dict[str, Any]:
    """Return what must be unchanged for a killed merge to continue."""
    files = [*shards, adapter / ADAPTER_CONFIG, adapter / ADAPTER_WEIGHTS]
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {"base": os.path.abspath(base), "adapter": os.path.abspath(adapter), "files": states}


def _write_shards(
    folder: ConversionFolder,
    shards: dict[Path, list[tuple[str, SafetensorsEntry]]],
    weights: HfWeights,
    adapter: LoraAdapter,
    reporter: Reporter,
) -> list[FileEntry]:
    outputs = [OutputFile(file.name, file.stat().st_size) for file in shards]
    finished = folder.finished_files(outputs, 1, reporter)
    missing = [(number, output) for number, output in enumerate(outputs) if output.path not in finished]
    needed_bytes = sum(output.bytes for _, output in missing)
    folder.check_space(
        needed_bytes,
        lambda free: f"the merge needs {needed_bytes / 1e9:,.3f} GB, and {free / 1e9:,.3f} GB are free",
        hint="free some space, or name a target on another disk",
    )
    files = {file.name: file for file in shards}
    with reporter.task("merging", total=needed_bytes, unit="B") as task:
        for number, output in missing:
            _write_shard(files[output.path], folder.file(output), shards[files[output.path]], adapter, task)
            finished[output.path] = hash_file(folder.target, output.path)
            folder.mark(number, finished[output.path])
    return [finished[output.path] for output in outputs]


def _write_shard(
    source: Path, target: Path, tensors: list[tuple[str, SafetensorsEntry]], adapter: LoraAdapter, task: ProgressTask
) -> None:
    """Copy a shard and overwrite the tensors that the adapter changes."""
    shutil.copyfile(source, target)
    task.advance(source.stat().st_size)
    with safe_open(source, framework="pt") as file, target.open("r+b") as handle:
        for name, stored in tensors:
            if name not in adapter.changed_tensors:
                continue
            task.describe(name)
            merged = adapter.merge(name, file.get_tensor(stored.name)).contiguous()
            handle.seek(stored.start)
            handle.write(merged.reshape(-1).view(torch.uint8).numpy().data)
