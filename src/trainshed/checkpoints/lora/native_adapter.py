"""The adapters in a checkpoint of a LoRA run.

    model.layers.0.attention.qkv.lora.q_proj.a            [r, C]
    model.layers.0.attention.qkv.lora.q_proj.b            [R, r], rows in Hugging Face's order
    model.layers.0.attention.qkv.lora.q_proj.magnitude    [R] (DoRA)
    model.layers.0.mlp.experts.lora.gate_proj.a           [experts, r, C]: those of experts are stacked
    model.embedding.added.weight, model.head.added.weight [tokens, C]: the rows of added tokens

A family whose tensors are fused (GPT-2's `c_attn`) has several projections in one matrix: their factors become one
pair, with the second factor block by block.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

import torch

from trainshed.checkpoints.lora.adapter import LoraAdapter, LoraFactors, TokenRows
from trainshed.checkpoints.lora.checkpoint_spec import AdapterSpec
from trainshed.checkpoints.native.folder import CompleteCheckpoint, read_checkpoint_config
from trainshed.checkpoints.native.index import read_index
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import DTYPES, TensorShard
from trainshed.checkpoints.native.weights import MODEL_PREFIX
from trainshed.models.hf_tensors import HfTensor, RowMapping, hf_table_name
from trainshed.models.parameters import Parameter, parameters, up_projection_name
from trainshed.storage import Store, join

_NAME = re.compile(r"(layers\.\d+\..+)\.lora\.(\w+)\.(a|b|magnitude)")
_TOKEN_ROWS = ("embedding.added.weight", "head.added.weight")
_PROJECTIONS = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "o_proj": 0, "gate_proj": 0, "up_proj": 1, "down_proj": 0}
"""Which part of its native tensor a projection is; without a gate, `up_proj` is the first."""
_Part = tuple[str, int]
"""(native tensor, number of the projection in it)."""


class NativeAdapter(LoraAdapter):
    """The adapters of a checkpoint, in memory."""

    def __init__(self, store: Store, checkpoint: CompleteCheckpoint) -> None:
        where = join(store.url, checkpoint.path)
        super().__init__(where, read_checkpoint_config(store, checkpoint))
        self.spec = AdapterSpec.read(checkpoint.manifest.spec, where)
        self._version = checkpoint.manifest.sha256
        self._parameters = {parameter.name: parameter for parameter in parameters(self.config)}
        self._parts: dict[_Part, dict[str, torch.Tensor]] = defaultdict(dict)
        self._token_rows: dict[str, TokenRows] = {}
        for name, tensor in self._load(store, checkpoint).items():
            self._add(name, tensor)
        self._mappings: dict[tuple[str, int], list[RowMapping]] = defaultdict(list)
        """By native tensor and expert."""
        self._adapted: dict[str, HfTensor] = {}
        for tensor in self.tensors.values():
            self._place(tensor)
        for part, sides in self._parts.items():
            self._check(part, sides)

    @property
    def version(self) -> str:
        """The checksum of the checkpoint's manifest."""
        return self._version

    @property
    def rank(self) -> int:
        """The rank of the factors."""
        return self.spec.lora.rank

    @property
    def scale(self) -> float:
        """The factor for the product of two factors."""
        lora = self.spec.lora
        return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)

    @property
    def adapted(self) -> frozenset[str]:
        """The tensors that have factors."""
        return frozenset(self._adapted)

    @property
    def token_rows(self) -> Mapping[str, TokenRows]:
        """The rows of added tokens, by the tensor that they are rows of."""
        return self._token_rows

    def factors(self, name: str) -> LoraFactors:
        """Return the factors of an adapted tensor."""
        tensor = self._adapted[name]
        placed = [(mapping, self._sides(mapping)) for mapping in tensor.row_mappings]
        parts = [(mapping, sides) for mapping, sides in placed if sides is not None]
        if len(placed) == 1:
            (_, sides) = parts[0]
            return LoraFactors(sides["a"], sides["b"], self.scale, sides.get("magnitude"))
        rank = self.rank
        rows = sum(mapping.rows for mapping in tensor.row_mappings)
        a = torch.cat([sides["a"] for _, sides in parts])
        b = torch.zeros(rows, rank * len(parts), dtype=a.dtype)
        for number, (mapping, sides) in enumerate(parts):
            b[mapping.hf_start : mapping.hf_start + mapping.rows, number * rank : (number + 1) * rank] = sides["b"]
        magnitude = None
        if self.spec.lora.dora:
            if len(parts) < len(placed):
                raise self.error(
                    f"DoRA has a length for some rows of `{name}` only",
                    "train all projections of attention, or merge the adapters",
                )
            magnitude = torch.cat([sides["magnitude"] for _, sides in parts])
        return LoraFactors(a, b, self.scale, magnitude)

    def _load(self, store: Store, checkpoint: CompleteCheckpoint) -> Mapping[str, torch.Tensor]:
        stored = read_index(store, checkpoint)
        tensors = {
            name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            for name, entry in stored.items()
            if name.startswith(MODEL_PREFIX)
        }
        shards = {
            name: TensorShard(tuple(tensor.shape), (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()
        }
        load_checkpoint(store, checkpoint, shards)
        return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if name in _TOKEN_ROWS and (added := self.spec.added) is not None:
            saved = hf_table_name(self.config, name.partition(".")[0])
            self._token_rows[saved] = TokenRows(tuple(range(added.start, added.stop)), tensor)
            return
        match = _NAME.fullmatch(name)
        parameter = None if match is None else self._parameter_of(match[1], match[2])
        if match is None or parameter is None:
            raise self.error(f"`{name}` is not an adapter of its model", "load it as the model that wrote it")
        number = _PROJECTIONS[match[2]]
        if match[2] == "up_proj" and not self.config.gated:
            number = 0
        self._parts[parameter.name, number][match[3]] = tensor

    def _parameter_of(self, module: str, projection: str) -> Parameter | None:
        """Return the native tensor that a projection is a part of."""
        if projection not in _PROJECTIONS:
            return None
        if module.endswith(".experts"):
            ending = "down" if projection == "down_proj" else up_projection_name(self.config)
            return self._parameters.get(f"{module}.{ending}")
        return self._parameters.get(f"{module}.weight")

    def _place(self, tensor: HfTensor) -> None:
        """Find out whether a tensor of the base is adapted; the mappings of a native tensor come in its order."""
        for mapping in tensor.row_mappings:
            self._mappings[mapping.native_name, mapping.expert or 0].append(mapping)
        if any(self._sides(mapping) is not None for mapping in tensor.row_mappings):
            self._adapted[tensor.name] = tensor

    def _sides(self, mapping: RowMapping) -> Mapping[str, torch.Tensor] | None:
        """Return the factors of the rows of a mapping; of stacked experts those of its own."""
        number = self._mappings[mapping.native_name, mapping.expert or 0].index(mapping)
        sides = self._parts.get((mapping.native_name, number))
        if sides is None or mapping.expert is None:
            return sides
        return {side: stacked[mapping.expert] for side, stacked in sides.items()}

    def _check(self, part: _Part, sides: Mapping[str, torch.Tensor]) -> None:
        """Check that the factors of a projection are complete and of the right shape."""
        native_name, number = part
        mapping = self._mappings[native_name, 0][number]
        parameter, rank = self._parameters[native_name], self.rank
        stacked = parameter.shape[:1] if parameter.expert else ()
        wanted: dict[str, tuple[int, ...]] = {
            "a": (*stacked, rank, parameter.shape[-1]),
            "b": (*stacked, mapping.rows, rank),
        }
        if self.spec.lora.dora:
            wanted["magnitude"] = (*stacked, mapping.rows)
        shapes = {side: tuple(tensor.shape) for side, tensor in sides.items()}
        if shapes != wanted:
            shown = ", ".join(f"{side} {list(shape)}" for side, shape in sorted(shapes.items()))
            right = ", ".join(f"{side} {list(shape)}" for side, shape in wanted.items())
            raise self.error(
                f"the factors of `{mapping.hf_name}` are {shown}, not {right}",
                "load it as the model and with the rank that wrote it",
            )
