"""Export the adapters of a LoRA run for PEFT and for servers that read its folders, proven and with the tokenizer.

    adapter_model.safetensors, adapter_config.json    what PEFT loads (`peft_adapter.py`)
    tokenizer.json, …, chat_template.jinja            the words that the adapters were trained with, added tokens too
    verdict.json, manifest.json                       as beside all converted weights

Each projection is a module of its own, with its own pair of factors. Experts are one parameter in transformers 5
(`target_parameters`): where gate and up have factors of their own, they become one pair of twice the rank.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainshed.checkpoints.convert.convert import Dtype
from trainshed.checkpoints.convert.target import ConversionTarget, explain_disk_errors, hash_file
from trainshed.checkpoints.formats import WeightsFormat
from trainshed.checkpoints.hf.companion_files import has_tokenizer, read_companions, with_chat_template
from trainshed.checkpoints.lora.adapter import LoraAdapter, LoraFactors, TokenRows
from trainshed.checkpoints.lora.native_adapter import NativeAdapter
from trainshed.checkpoints.lora.peft_adapter import TOKEN_ROWS, PeftAdapter, expert_names, joined_rows
from trainshed.checkpoints.lora.peft_config import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from trainshed.checkpoints.native.folder import find_checkpoint
from trainshed.checkpoints.prove.verdict import TensorProof, Verdict, verdict_of_tensors, write_verdict
from trainshed.checkpoints.weights import dtype_name
from trainshed.models.families import HF_FAMILIES
from trainshed.recipe import Lora, ModelConfig
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore, Manifest, StoreOptions, join, open_store, parse
from trainshed.storage.manifest import MANIFEST

KIND = "adapter"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MERGE = "write `export: {merge: true}`, and the merged weights are exported instead"
_NO_LOGITS = "adapters are compared by the change that each of them makes"
# The product of two joined pairs sums the same terms and some zeros, maybe in another order.
_JOINED_TOLERANCE = 1e-6


@dataclass(frozen=True)
class AdapterExport:
    """The result of an export."""

    source: str
    target: str
    rank: int
    tensors: int
    bytes: int
    verdict: Verdict


def export_adapter(
    source: str,
    target: str,
    *,
    dtype: Dtype | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    end_tokens: Sequence[int] = (),
    replace: bool = False,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> AdapterExport:
    """Write the adapters of a run (its newest checkpoint) or of a checkpoint as a folder of PEFT's, and prove it.

    `tokenizer` is the folder of the run's tokenizer, `chat_template` the text of the template that conversations were
    written with, where it is not the tokenizer's own, and `end_tokens` what ends an answer by it. A verdict that failed
    is stored and returned like one that passed: the caller decides. With `replace` a target that holds another export
    is made anew.
    """
    store, path = open_store(source, options)
    checkpoint = find_checkpoint(store, path, reporter)
    adapter = NativeAdapter(store, checkpoint)
    if (added := adapter.spec.added) is not None and added.stop > added.base_rows:
        reporter.note(
            f"the base has {added.base_rows:,} rows, and these adapters use {added.vocab_size:,}: before PEFT loads "
            f"them, call model.resize_token_embeddings({added.vocab_size})"
        )
    origin = _ExportOrigin(
        join(store.url, checkpoint.path),
        checkpoint.manifest.sha256,
        adapter,
        adapter.spec.lora,
        adapter.spec.base_address,
        _companions(source, "native", tokenizer, options),
    )
    return _export(origin, target, dtype, tokenizer, chat_template, end_tokens, replace, options, reporter)


def export_peft_folder(
    source: Path,
    target: str,
    lora: Lora,
    config: ModelConfig,
    *,
    base: str | None,
    dtype: Dtype | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    end_tokens: Sequence[int] = (),
    replace: bool = False,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> AdapterExport:
    """Write adapters that another engine has saved as PEFT does once more, complete and proven.

    Its config may lack what PEFT and servers look for (torchtune's names no base). `config` is the architecture of the
    base, the rest is as for `export_adapter`.
    """
    adapter = PeftAdapter(source, config)
    if (adapter.rank, adapter.settings.alpha) != (lora.rank, lora.alpha):
        raise adapter.error(
            f"rank and alpha are {adapter.rank} and {adapter.settings.alpha:g}, and the recipe has {lora.rank} and "
            f"{lora.alpha:g}",
            "export it with the recipe that it was trained by",
        )
    companions = _companions(str(source), "hf", tokenizer, options)
    origin = _ExportOrigin(str(source), adapter.version, adapter, lora, base, companions)
    return _export(origin, target, dtype, tokenizer, chat_template, end_tokens, replace, options, reporter)


@dataclass(frozen=True)
class _ExportOrigin:
    """What is exported: where it is, its version, the adapters, how they were trained, on what, with which words."""

    address: str
    version: str
    adapter: LoraAdapter
    lora: Lora
    base: str | None
    companions: dict[str, bytes]


def _export(
    origin: _ExportOrigin,
    target: str,
    dtype: Dtype | None,
    tokenizer: str | None,
    chat_template: str | None,
    end_tokens: Sequence[int],
    replace: bool,
    options: StoreOptions | None,
    reporter: Reporter,
) -> AdapterExport:
    adapter = origin.adapter
    place = ConversionTarget(target, None, options)
    spec: dict[str, Any] = {
        "from": origin.address,
        "checkpoint": origin.version,
        "to": "peft",
        "dtype": dtype_name(_DTYPES[dtype] if dtype else torch.float32),
        "tokenizer": tokenizer,
        "chat_template": chat_template,
    }
    if end_tokens:
        spec["end_tokens"] = list(end_tokens)
    earlier = place.manifest()
    if earlier is not None and replace and (earlier.kind != KIND or dict(earlier.spec) != spec):
        reporter.note(f"{target} holds what this run exported before: it is made anew")
        place.clear()
        earlier = None
    if earlier is not None:
        if earlier.kind != KIND or dict(earlier.spec) != spec:
            raise place.occupied_error(f"the export of {earlier.spec.get('from', 'something else')}")
        reporter.note("this export is done already")
        return _result(spec["from"], target, adapter, earlier, place.verdict())
    written = _CastAdapter(adapter, _DTYPES[dtype] if dtype else torch.float32)
    companions = with_chat_template(origin.companions, chat_template, end_tokens)
    if not has_tokenizer(companions):
        reporter.warn("the export has no tokenizer: the run brings none")
    with place.folder.locked():
        place.folder.start(spec)
        folder = place.folder.target
        with explain_disk_errors(folder):
            write_peft_folder(folder, written, origin.lora, base=origin.base, reporter=reporter)
            for name, data in companions.items():
                LocalStore(folder).put(name, data)
        verdict = _prove(written, PeftAdapter(folder, adapter.config), spec["dtype"])
        write_verdict(folder, verdict)
        paths = [info.path for info in LocalStore(folder).list() if info.path != MANIFEST]
        facts = {"family": adapter.config.family, "rank": adapter.rank, "tensors": len(adapter.changed_tensors)}
        manifest = Manifest.of(KIND, spec, [hash_file(folder, path) for path in paths], facts)
        place.publish(manifest, set())
    return _result(spec["from"], target, adapter, manifest, verdict)


def _result(source: str, target: str, adapter: LoraAdapter, manifest: Manifest, verdict: Verdict) -> AdapterExport:
    return AdapterExport(source, target, adapter.rank, len(adapter.changed_tensors), manifest.total_bytes, verdict)


def _companions(
    source: str, format: WeightsFormat, tokenizer: str | None, options: StoreOptions | None
) -> dict[str, bytes]:
    """Return the files of the tokenizer; the config of a whole model has no place beside an adapter."""
    companions = read_companions(source, format, tokenizer=tokenizer, options=options)
    companions.pop("config.json", None)
    return companions


class _CastAdapter(LoraAdapter):
    """An adapter whose factors are rounded to the dtype of an export."""

    def __init__(self, adapter: LoraAdapter, dtype: torch.dtype) -> None:
        super().__init__(adapter.where, adapter.config)
        self._adapter, self._dtype = adapter, dtype

    @property
    def version(self) -> str:
        return self._adapter.version

    @property
    def rank(self) -> int:
        return self._adapter.rank

    @property
    def adapted(self) -> frozenset[str]:
        return self._adapter.adapted

    @property
    def token_rows(self) -> Mapping[str, TokenRows]:
        return {name: rows.to(self._dtype) for name, rows in self._adapter.token_rows.items()}

    def factors(self, name: str) -> LoraFactors:
        return self._adapter.factors(name).to(self._dtype)


def _prove(source: LoraAdapter, target: LoraAdapter, dtype: str) -> Verdict:
    """Compare what each tensor is changed by: the adapters of the run, and what PEFT's folder says when it is read."""
    ours, theirs = source.changed_tensors, target.changed_tensors
    problems = [f"`{name}` is only in the run" for name in sorted(ours - theirs)]
    problems += [f"`{name}` is only in the export" for name in sorted(theirs - ours)]
    both = sorted(source.adapted & target.adapted)
    problems += [
        f"`{name}` is changed otherwise" for name in both if not _same(source.factors(name), target.factors(name))
    ]
    for name in sorted(source.token_rows.keys() & target.token_rows.keys()):
        rows, stored = source.token_rows[name], target.token_rows[name]
        if rows.ids != stored.ids or not rows.values.equal(stored.values):
            problems.append(f"the rows of trained tokens of `{name}` are others")
    compared = len(ours | theirs)
    proof = TensorProof(compared, compared - len(problems), problems[0] if problems else None, dtype)
    return verdict_of_tensors(proof, _NO_LOGITS)


def _same(wanted: LoraFactors, stored: LoraFactors) -> bool:
    if (wanted.magnitude is None) != (stored.magnitude is None):
        return False
    if wanted.magnitude is not None and stored.magnitude is not None and not wanted.magnitude.equal(stored.magnitude):
        return False
    expected, delta = wanted.delta(), stored.delta()
    if wanted.a.shape == stored.a.shape:
        return expected.equal(delta)
    return bool((expected - delta).abs().max() <= _JOINED_TOLERANCE * expected.abs().max())


def write_peft_folder(
    folder: Path, adapter: LoraAdapter, lora: Lora, *, base: str | None = None, reporter: Reporter = SILENT
) -> None:
    """Write an adapter as PEFT does; `base` is the address of the model that PEFT should load it onto."""
    modules = dict(_modules(adapter))
    experts = dict(_expert_modules(adapter))
    if experts and lora.dora:
        raise adapter.error("PEFT has no DoRA of experts", _MERGE)
    if experts and lora.dropout:
        reporter.note("adapter_config.json says `lora_dropout: 0`: PEFT has no dropout before the adapters of experts")
    tensors: dict[str, torch.Tensor] = {}
    for module, factors in modules.items():
        tensors[f"{ADAPTER_PREFIX}{module}.lora_A.weight"] = factors.a
        tensors[f"{ADAPTER_PREFIX}{module}.lora_B.weight"] = factors.b
        if factors.magnitude is not None:
            tensors[f"{ADAPTER_PREFIX}{module}.lora_magnitude_vector"] = factors.magnitude
    for (module, parameter), stacked in experts.items():
        # PEFT wraps one parameter after the other: the first is innermost.
        names, count = expert_names(adapter.config), len(stacked)
        inner = parameter != names.parameters["down"] and (module, names.parameters["down"]) in experts
        prefix = f"{ADAPTER_PREFIX}{module}.base_layer" if inner else f"{ADAPTER_PREFIX}{module}"
        pairs = [(factors.b.T, factors.a.T) if names.exchanged else (factors.a, factors.b) for factors in stacked]
        tensors[f"{prefix}.lora_A.weight"] = torch.cat([a for a, _ in pairs])
        b = torch.stack([b for _, b in pairs], dim=-1)
        tensors[f"{prefix}.lora_B.weight"] = b.reshape(b.shape[0], b.shape[1] * count)
    for name, rows in adapter.token_rows.items():
        tensors[f"{ADAPTER_PREFIX}{name.removesuffix('.weight')}{TOKEN_ROWS}"] = rows.values
    body = _peft_config(adapter, lora, modules, experts, base)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
    # Tensors of a file may not share memory.
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )


def _modules(adapter: LoraAdapter) -> Iterator[tuple[str, LoraFactors]]:
    """Yield the adapted modules that are not experts, with their factors."""
    for name in sorted(adapter.adapted):
        if adapter.tensors[name].row_mappings[0].expert is not None:
            continue
        if not name.endswith(".weight"):  # a name of our own: see `projection_tensors`
            raise adapter.error(
                f"Hugging Face's {adapter.config.family} has no module for `{name}`",
                "keep it native: `trainshed generate` and `serve` take the run itself",
            )
        yield name.removesuffix(".weight"), adapter.factors(name)


def _expert_modules(adapter: LoraAdapter) -> Iterator[tuple[tuple[str, str], list[LoraFactors]]]:
    """Yield the adapted parameters of experts, by (module, parameter), with the factors of each expert."""
    parts: dict[str, dict[int, list[_ExpertMatrix]]] = defaultdict(lambda: defaultdict(list))
    names = expert_names(adapter.config)
    for name, tensor in adapter.tensors.items():
        mapping = tensor.row_mappings[0]
        if mapping.expert is not None:
            factors = adapter.factors(name) if name in adapter.adapted else None
            rows = joined_rows(tensor, alternating=names.alternating)
            parts[mapping.native_name][mapping.expert].append(_ExpertMatrix(mapping.rows, rows, factors))
    layer_name = HF_FAMILIES[adapter.config.family].names.layer
    for native_name, experts in parts.items():
        if all(matrix.factors is None for matrices in experts.values() for matrix in matrices):
            continue
        words = native_name.split(".")
        module = layer_name.format(layer=int(words[1])) + names.module
        stacked = [_joined(experts[number]) for number in sorted(experts)]
        yield (module, names.parameters[words[-1]]), stacked


@dataclass(frozen=True)
class _ExpertMatrix:
    """A matrix of an expert that is a part of one in transformers; `places` as in `joined_rows`."""

    rows: int
    places: slice | None
    factors: LoraFactors | None


def _joined(matrices: list[_ExpertMatrix]) -> LoraFactors:
    """Join the factors of matrices that are one in transformers, with zeros elsewhere."""
    adapted = [matrix.factors for matrix in matrices if matrix.factors is not None]
    a = torch.cat([factors.a for factors in adapted])
    b = torch.zeros(sum(matrix.rows for matrix in matrices), a.shape[0], dtype=a.dtype)
    row = column = 0
    for matrix in matrices:
        if (factors := matrix.factors) is not None:
            rank = factors.b.shape[1]
            b[matrix.places or slice(row, row + matrix.rows), column : column + rank] = factors.b
            column += rank
        row += matrix.rows
    return LoraFactors(a, b, adapted[0].scale)


def _peft_config(
    adapter: LoraAdapter,
    lora: Lora,
    modules: Mapping[str, LoraFactors],
    experts: Mapping[tuple[str, str], list[LoraFactors]],
    base: str | None,
) -> dict[str, Any]:
    name, revision = _base_name(base)
    ranks = {module: factors.a.shape[0] for module, factors in modules.items()}
    experts_module = expert_names(adapter.config).module
    ranks |= {f"{experts_module}.{parameter}": stacked[0].a.shape[0] for (_, parameter), stacked in experts.items()}
    # Other ranks come from factors that were joined; they have the scale of all the others.
    joined = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    scale = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
    body: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": _whole(lora.alpha),
        "lora_dropout": 0.0 if experts else lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": _target_modules(adapter, set(modules)),
        "rank_pattern": joined,
        "alpha_pattern": {
            module: _whole(scale * (math.sqrt(rank) if lora.rslora else rank)) for module, rank in joined.items()
        },
        "fan_in_fan_out": any(adapter.tensors[f"{module}.weight"].row_mappings[0].transposed for module in modules),
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
    if experts:
        body["target_parameters"] = sorted({f"{experts_module}.{parameter}" for _, parameter in experts})
    if adapter.token_rows:
        body["trainable_token_indices"] = {
            name.removesuffix(".weight").rsplit(".", 1)[-1]: list(rows.ids) for name, rows in adapter.token_rows.items()
        }
    return body


def _whole(value: float) -> float:
    """Return a whole number as such, which is how PEFT writes alpha."""
    return int(value) if value == int(value) else value


def _base_name(address: str | None) -> tuple[str | None, str | None]:
    """Return how PEFT names a base: a name on the Hub and its revision, or a path."""
    if address is None:
        return None, None
    if (parsed := parse(address)).scheme != "hf":
        return (os.path.abspath(str(parsed)) if parsed.scheme == "file" else address), None
    name, _, revision = address.removeprefix("hf://").partition("@")
    return name, revision or None


def _target_modules(adapter: LoraAdapter, adapted: set[str]) -> list[str]:
    """Return the adapted modules: by the end of a name where all modules with it are adapted, otherwise in full."""
    all_modules = {
        name.removesuffix(".weight")
        for name, tensor in adapter.tensors.items()
        if name.endswith(".weight") and tensor.row_mappings[0].expert is None
    }
    targets: set[str] = set()
    for module in adapted:
        ending = module.rsplit(".", 1)[-1]
        alike = {other for other in all_modules if other.rsplit(".", 1)[-1] == ending}
        targets.add(ending if alike <= adapted else module)
    return sorted(targets)
