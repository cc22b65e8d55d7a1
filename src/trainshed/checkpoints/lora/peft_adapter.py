"""An adapter as PEFT saves it.

    adapter_config.json          rank, alpha, which modules (`peft_config.py`)
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, C], .lora_B.weight [R, r],
                                 .lora_magnitude_vector [R] (DoRA), .lora_embedding_A, .lora_embedding_B;
                                 <module>.weight for a module that was trained whole,
                                 <module>.token_adapter.trainable_tokens_delta [tokens, C] for rows of tokens; a head
                                 that is tied to the embedding has its rows

The experts of a layer are one parameter in transformers 5, and PEFT adapts it as one (`target_parameters`): its factors
hold those of all experts, A expert after expert, B with the experts alternating. The factors of `gate_up_proj` are at
`mlp.experts.base_layer` where `down_proj` is adapted as well, otherwise at `mlp.experts`. Where a model stores such a
matrix as [in, out] and transformers does not say so (Llama 4), PEFT takes inputs for outputs: its A is our B,
transposed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from trainshed.checkpoints.hf.safetensors_header import read_safetensors_header
from trainshed.checkpoints.lora.adapter import LoraAdapter, LoraFactors, TokenRows
from trainshed.checkpoints.lora.peft_config import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS, LoraAdapterConfig
from trainshed.errors import NotFound
from trainshed.models.families import HF_FAMILIES
from trainshed.models.hf_tensors import HfTensor
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig

_FACTOR = re.compile(r"(.*)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?")
_MAGNITUDE = "magnitude_vector"
TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
"""How the name of trained rows ends, after that of their module."""


@dataclass(frozen=True)
class ExpertNames:
    """What transformers 5 calls the experts of a layer, and our stacked tensors of them."""

    module: str
    parameters: Mapping[str, str]
    alternating: bool
    """Rows of gate and up alternate; otherwise all gates come first."""
    exchanged: bool
    """PEFT takes the inputs of a matrix for its outputs."""


def expert_names(config: ModelConfig) -> ExpertNames:
    """Return the names of a family's experts."""
    names = HF_FAMILIES[config.family].names
    usual = {"gate_up": "gate_up_proj", "up": "up_proj", "down": "down_proj"}
    if not names.stacked:
        return ExpertNames("mlp.experts", usual, alternating=False, exchanged=False)
    module, _, _ = names.tensors["mlp.experts.down"][0].rpartition(".")
    stored_as_inputs = "mlp.experts.down" in names.transposed
    return ExpertNames(
        module, usual, "mlp.experts.gate_up" in names.alternating, stored_as_inputs and not names.says_transposed
    )


def joined_rows(tensor: HfTensor, *, alternating: bool) -> slice | None:
    """Return where an expert's matrix has its rows in one of gate and up together; None: after those before it."""
    mapping = tensor.row_mappings[0]
    rows = mapping.native_rows(0, mapping.rows) if alternating else None
    assert rows is None or isinstance(rows, slice), "rows of an expert are at a fixed distance"
    return rows


@dataclass(frozen=True)
class _ExpertPart:
    """The factors of one matrix of one expert, as a part of those of all experts."""

    number: int
    experts: int
    rows: slice
    all_rows: int
    """Of gate and up together."""
    exchanged: bool
    """As in `ExpertNames`."""


@dataclass(frozen=True)
class _StoredFactors:
    """Where the factors of a tensor are: keys of the file by what they are; `module` is what patterns name."""

    module: str
    keys: dict[str, str]
    expert: _ExpertPart | None = None

    @property
    def is_embedding(self) -> bool:
        """Whether PEFT stores the factors of the transposed tensor."""
        return "embedding_A" in self.keys or "embedding_B" in self.keys


class PeftAdapter(LoraAdapter):
    """The adapter in a folder, checked against the architecture of its base."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        super().__init__(os.path.abspath(folder), config)
        self.folder, self.settings = folder, LoraAdapterConfig.read(folder)
        if not (folder / ADAPTER_WEIGHTS).exists():
            raise NotFound(
                f"there is no {ADAPTER_WEIGHTS}",
                where=str(folder),
                hint="pickled adapters (.bin) are never opened: save it with save_pretrained",
            )
        self._stored = read_safetensors_header(folder / ADAPTER_WEIGHTS)
        self._factors: dict[str, _StoredFactors] = {}
        self._replaced: dict[str, str] = {}
        self._token_rows: dict[str, TokenRows] = {}
        by_module: dict[str, dict[str, str]] = {}
        for key in sorted(self._stored):
            self._classify(key, by_module)
        for module, keys in by_module.items():
            self._factors.update(self._factors_of(module, keys))
        self._check()

    @property
    def version(self) -> str:
        """The sizes and times of its two files."""
        states = [(self.folder / name).stat() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
        return " ".join(f"{state.st_size}:{state.st_mtime_ns}" for state in states)

    @property
    def rank(self) -> int:
        """The rank of its factors, unless some modules have another."""
        return self.settings.rank

    @property
    def adapted(self) -> frozenset[str]:
        """The tensors that have factors."""
        return frozenset(self._factors)

    @property
    def replaced(self) -> frozenset[str]:
        """The tensors that are replaced whole."""
        return frozenset(self._replaced)

    @property
    def token_rows(self) -> Mapping[str, TokenRows]:
        """The rows of trained tokens, by the tensor that they are rows of."""
        return self._token_rows

    def factors(self, name: str) -> LoraFactors:
        """Return the factors of an adapted tensor."""
        stored = self._factors[name]
        keys, part = stored.keys, stored.expert
        if stored.is_embedding:
            a, b = self._read(keys["embedding_B"]).T, self._read(keys["embedding_A"]).T
        else:
            a, b = self._read(keys["A"]), self._read(keys["B"])
        if part is not None:
            a = a.reshape(part.experts, -1, a.shape[-1])[part.number]
            b = b.reshape(b.shape[0], -1, part.experts)[:, :, part.number]
            a, b = (b.T, a.T) if part.exchanged else (a, b)
            b = b[part.rows]
        magnitude = self._read(keys[_MAGNITUDE]) if _MAGNITUDE in keys else None
        return LoraFactors(a, b, self.settings.scale(stored.module, a.shape[0]), magnitude)

    def replacement(self, name: str) -> torch.Tensor:
        """Return what replaces a tensor."""
        return self._read(self._replaced[name])

    def _classify(self, key: str, by_module: dict[str, dict[str, str]]) -> None:
        """Classify a stored tensor: it is one of a module's factors, or it replaces a tensor of the base."""
        name = key.removeprefix(ADAPTER_PREFIX)
        match = _FACTOR.fullmatch(name)
        if match and key.startswith(ADAPTER_PREFIX):
            by_module.setdefault(match[1], {})[match[2]] = key
            return
        if name.endswith(TOKEN_ROWS) and key.startswith(ADAPTER_PREFIX):
            self._add_token_rows(key, name.removesuffix(TOKEN_ROWS))
            return
        # PEFT saves an embedding's own weights beside its factors.
        name = self._saved_name(name.replace(".base_layer.", "."))
        if not key.startswith(ADAPTER_PREFIX) or name not in self.tensors:
            raise self.error(f"`{key}` has no place in the base model", "name the base that it was trained on")
        self._replaced[name] = key

    def _add_token_rows(self, key: str, module: str) -> None:
        """Add the rows of trained tokens of an embedding or a head."""
        tokens, name = self.settings.trained_tokens, f"{module}.weight"
        ids = next((ids for end, ids in tokens.items() if not end or f".{module}".endswith(f".{end}")), None)
        if ids is None or name not in self.tensors:
            raise self.error(
                f"`{key}` has no place: the base has no such tensor, or `trainable_token_indices` in {ADAPTER_CONFIG} "
                "does not name it",
                "name the base that it was trained on",
            )
        rows, width = self.tensors[name].shape
        if self._stored[key].shape != (len(ids), width):
            wanted = [len(ids), width]
            raise self.error(f"`{key}` is {list(self._stored[key].shape)}, not {wanted}", "fetch or save it again")
        if max(ids) >= rows:
            raise self.error(
                f"the adapter trains the row of token {max(ids)}, and the base has {rows:,} rows",
                f"resize the base first: transformers' resize_token_embeddings({max(ids) + 1})",
            )
        self._token_rows[name] = TokenRows(ids, self._read(key))

    def _factors_of(self, module: str, keys: dict[str, str]) -> Iterator[tuple[str, _StoredFactors]]:
        """Yield the tensors that a module's factors change: one, or those of all experts of a layer."""
        sides = {"embedding_A", "embedding_B"} if keys.keys() & {"embedding_A", "embedding_B"} else {"A", "B"}
        wanted = sides | ({_MAGNITUDE} if self.settings.dora else set())
        if keys.keys() != wanted:
            raise self.error(
                f"`{module}` has {_named(keys)} and not {_named(wanted)}", "fetch or save the adapter again"
            )
        if self.settings.dora and "embedding_A" in keys:
            raise self.error(
                f"`{module}` is an embedding with `use_dora`", "merge it with PEFT itself (merge_and_unload)"
            )
        plain = module.removesuffix(".base_layer")
        if (
            plain.endswith(f".{expert_names(self.config).module}")
            and self.config.moe is not None
            and self.settings.target_parameters
        ):
            yield from self._expert_factors(plain, keys, inner=plain != module)
            return
        name = self._saved_name(f"{module}.weight")
        if name not in self.tensors:
            raise self.error(
                f"the base has no tensor of its own for `{module}`",
                "name the base it was trained on; a head that is tied to the embedding is not adapted alone",
            )
        yield name, _StoredFactors(module, keys)

    def _expert_factors(
        self, module: str, keys: dict[str, str], *, inner: bool
    ) -> Iterator[tuple[str, _StoredFactors]]:
        """Yield the tensors of all experts that one pair of factors changes."""
        assert self.config.moe is not None, "only models with experts have them"
        names = expert_names(self.config)
        nested = f"{ADAPTER_PREFIX}{module}.base_layer.lora_A.weight" in self._stored
        named = {name.rsplit(".", 1)[-1] for name in self.settings.target_parameters}
        parameter = self._expert_parameter(module, down=not inner and (nested or named == {"down_proj"}))
        parameter_name = names.parameters[parameter.name.rsplit(".", 1)[-1]]
        _, all_rows, columns = parameter.shape
        exchanged = names.exchanged
        if all_rows != columns and (width := self._stored[keys["A"]].shape[-1]) in (all_rows, columns):
            exchanged = width == all_rows  # versions of PEFT and transformers differ in it
        first_rows = dict.fromkeys(range(self.config.moe.experts), 0)
        for tensor in self.tensors.values():
            mapping = tensor.row_mappings[0]
            if mapping.native_name != parameter.name:
                continue
            assert mapping.expert is not None, "each tensor is that of one expert"
            first_row = first_rows[mapping.expert]
            first_rows[mapping.expert] += mapping.rows
            rows = joined_rows(tensor, alternating=names.alternating) or slice(first_row, first_row + mapping.rows)
            part = _ExpertPart(mapping.expert, self.config.moe.experts, rows, all_rows, exchanged)
            yield tensor.name, _StoredFactors(f"{module}.{parameter_name}", keys, part)

    def _expert_parameter(self, module: str, *, down: bool) -> Parameter:
        """Return the stacked tensor of a layer's experts: the down projection, or the one before it."""
        layer_name = HF_FAMILIES[self.config.family].names.layer
        for parameter in parameters(self.config):
            in_module = layer_name.format(layer=parameter.layer) + expert_names(self.config).module == module
            if parameter.expert and in_module and parameter.name.endswith(".down") == down:
                return parameter
        raise self.error(f"the base has no experts at `{module}`", "name the base that it was trained on")

    def _saved_name(self, name: str) -> str:
        """Return the name under which transformers saves a tensor; in memory it calls Mixtral's blocks otherwise."""
        saved = name.replace(".mlp.", ".block_sparse_moe.")
        return saved if name not in self.tensors and saved in self.tensors else name

    def _check(self) -> None:
        """Check that the shapes fit the base."""
        for name, stored in self._factors.items():
            rank = self.settings.rank_of(stored.module)
            wanted = self._wanted_shapes(name, stored, rank)
            shapes = {side: self._stored[key].shape for side, key in stored.keys.items()}
            if shapes == wanted:
                continue
            first, second = sorted(wanted.keys() - {_MAGNITUDE})
            if shapes[first] == wanted[first] and shapes[second] == wanted[second]:
                what = (
                    f"the magnitude of `{stored.module}` is {list(shapes[_MAGNITUDE])}, not {list(wanted[_MAGNITUDE])}"
                )
            else:
                what = (
                    f"the factors of `{stored.module}` are {list(shapes[first])} and {list(shapes[second])}, "
                    f"not {list(wanted[first])} and {list(wanted[second])}"
                )
            raise self.error(what, f"the base and the rank in {ADAPTER_CONFIG} must be those it was trained with")
        for name, key in self._replaced.items():
            if self._stored[key].shape != self.tensors[name].shape:
                raise self.error(
                    f"`{key}` is {list(self._stored[key].shape)}, in the base it is {list(self.tensors[name].shape)}",
                    "resize the base's vocabulary with transformers first",
                )

    def _wanted_shapes(self, name: str, stored: _StoredFactors, rank: int) -> dict[str, tuple[int, ...]]:
        shape = self.tensors[name].shape
        rows, columns = shape[::-1] if self.tensors[name].row_mappings[0].transposed else shape
        if stored.is_embedding:
            return {"embedding_A": (rank, rows), "embedding_B": (columns, rank)}
        if (part := stored.expert) is not None:
            inputs, outputs = (part.all_rows, columns) if part.exchanged else (columns, part.all_rows)
            return {"A": (rank * part.experts, inputs), "B": (outputs, rank * part.experts)}
        wanted: dict[str, tuple[int, ...]] = {"A": (rank, columns), "B": (rows, rank)}
        if self.settings.dora:
            wanted[_MAGNITUDE] = (rows,)
        return wanted

    def _read(self, key: str) -> torch.Tensor:
        with safe_open(self.folder / ADAPTER_WEIGHTS, framework="pt") as file:
            return file.get_tensor(key)


def _named(sides: dict[str, str] | set[str]) -> str:
    return ", ".join(f"lora_{side}" for side in sorted(sides)) or "nothing"
