"""Several adapters over one copy of the base weights: each row of a step is changed by the adapter of its request.

A projection computes y = W x for all rows at once. Then a row of adapter i gets the product of its two factors,
y + b_i (a_i x), and with DoRA a length for each output: d_i · (y + b_i (a_i x)). The lengths do not depend on x: d_i
is computed when the adapter is loaded.

Rows of a prefill come sequence by sequence: each run of rows of one adapter is a product of its own. A decode step has
one row per request in any order. The factors of all adapters are one matrix there, and a row keeps only the columns of
its own adapter: no sorting, and always the same kernels, which a CUDA graph can replay.

Without adapters none of this exists: projections multiply as they do in training.

Shapes: T rows, R outputs, C inputs, r rank, K ranks of all adapters of a projection, n adapters. Adapter 0 is the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainshed.checkpoints.lora.adapter import LoraAdapter
from trainshed.errors import InputError
from trainshed.models.decoder import DecoderStage
from trainshed.models.hf_tensors import RowMapping
from trainshed.models.layers import Linear, gates_first
from trainshed.models.parameters import Parameter, parameters

_ALONE = "serve it alone (`trainshed serve ADAPTER`: it is merged into its base), or merge it first"


@dataclass(frozen=True)
class RowRuns:
    """The adapters of rows that come in runs: (first row, end, adapter), the base left out."""

    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, lengths: Sequence[int], adapters: Sequence[int]) -> RowRuns | None:
        """Return the runs of sequences of these lengths; None where all are of the base."""
        runs: list[tuple[int, int, int]] = []
        start = 0
        for length, adapter in zip(lengths, adapters, strict=True):
            if adapter and runs and runs[-1][1:] == (start, adapter):
                runs[-1] = (runs[-1][0], start + length, adapter)
            elif adapter:
                runs.append((start, start + length, adapter))
            start += length
        return cls(tuple(runs)) if runs else None


@dataclass
class AdapterStep:
    """The adapters of the rows of the running step: in runs, or an int64 tensor [T]; None: all rows are the base's."""

    rows: RowRuns | torch.Tensor | None = None


class AdapterMatmul:
    """How a projection multiplies where adapters are loaded: a `MatmulFunction`."""

    def __init__(
        self, step: AdapterStep, factors: Mapping[int, _NativeFactors], adapters: int, dtype: torch.dtype
    ) -> None:
        self._step = step
        self._spans: dict[int, tuple[int, int]] = {}
        end = 0
        for adapter, native in factors.items():
            start, end = end, end + native.a.shape[0]
            self._spans[adapter] = (start, end)
        device = next(iter(factors.values())).a.device
        self._a = torch.cat([native.a for native in factors.values()]).to(dtype)
        self._b = torch.cat([native.b for native in factors.values()], dim=1).to(dtype)
        owners = [adapter for adapter, (start, end) in self._spans.items() for _ in range(start, end)]
        self._owners = torch.tensor(owners, device=device)
        """The adapter of each column of `b`: int64 [K]."""
        self._row_scales: torch.Tensor | None = None
        """DoRA's lengths [n + 1, R], where an adapter has them."""
        if any(native.row_scale is not None for native in factors.values()):
            self._row_scales = torch.ones(adapters + 1, self._b.shape[0], dtype=dtype, device=device)
            for adapter, native in factors.items():
                if native.row_scale is not None:
                    self._row_scales[adapter] = native.row_scale.to(dtype)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows [T, …, C] with the weight [R, C] and the adapters of the running step."""
        assert copy is None, "served weights are in the dtype of the products"
        out = F.linear(x, weight)
        rows = self._step.rows
        if rows is None:
            return out
        return self._in_runs(x, out, rows) if isinstance(rows, RowRuns) else self._by_row(x, out, rows)

    def _in_runs(self, x: torch.Tensor, out: torch.Tensor, rows: RowRuns) -> torch.Tensor:
        for first, end, adapter in rows.runs:
            if (span := self._spans.get(adapter)) is None:
                continue
            columns = slice(*span)
            part = out[first:end]
            if self._row_scales is not None:
                part.mul_(self._row_scales[adapter])
            part.add_(F.linear(F.linear(x[first:end], self._a[columns]), self._b[:, columns]))
        return out

    def _by_row(self, x: torch.Tensor, out: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
        own = adapters.view(-1, *(1,) * (x.dim() - 1)) == self._owners
        low = F.linear(x, self._a)
        low = torch.where(own, low, torch.zeros((), dtype=low.dtype, device=low.device))
        if self._row_scales is not None:
            out = out * self._row_scales[adapters].view(len(adapters), *(1,) * (x.dim() - 2), -1)
        return out + F.linear(low, self._b)


@dataclass(frozen=True)
class _NativeFactors:
    """The factors of a native tensor, rows in the order in which it is served; scale and lengths are in `b`."""

    a: torch.Tensor
    b: torch.Tensor
    row_scale: torch.Tensor | None


class AdapterBank:
    """The adapters of a decoder, by name; they take the place of its projections' products."""

    @torch.no_grad()
    def __init__(self, decoder: DecoderStage, adapters: Mapping[str, LoraAdapter]) -> None:
        self.step = AdapterStep()
        self.names = tuple(adapters)
        self._numbers = {name: number for number, name in enumerate(adapters, start=1)}
        modules = dict(decoder.named_modules())
        factors: dict[str, dict[int, _NativeFactors]] = {}
        for name, adapter in adapters.items():
            refuse_unserved(name, adapter)
            for parameter, mappings in _adapted_parameters(adapter):
                module = modules[parameter.name.removesuffix(".weight")]
                assert isinstance(module, Linear), "only projections are served with adapters"
                native = _native_factors(adapter, parameter, mappings, module)
                factors.setdefault(parameter.name, {})[self._numbers[name]] = native
        for parameter_name, of_adapters in factors.items():
            module = modules[parameter_name.removesuffix(".weight")]
            assert isinstance(module, Linear), "only projections are served with adapters"
            module.matmul = AdapterMatmul(self.step, of_adapters, len(adapters), decoder.spec.dtype)

    def number(self, name: str | None) -> int:
        """Return the number of an adapter; None is the base, number 0."""
        if name is None:
            return 0
        if name not in self._numbers:
            raise InputError(f"there is no adapter `{name}`", hint=f"loaded are {', '.join(self.names)}")
        return self._numbers[name]


def refuse_unserved(name: str, adapter: LoraAdapter) -> None:
    """Refuse an adapter that cannot be one of several: what it changes is not only a product of rows."""
    if adapter.replaced:
        raise adapter.error(f"the adapter `{name}` replaces `{min(adapter.replaced)}` as a whole", _ALONE)
    if adapter.token_rows:
        changed = min(adapter.token_rows)
        raise adapter.error(f"the adapter `{name}` has rows of added tokens in `{changed}`, which all share", _ALONE)
    for tensor_name in sorted(adapter.adapted):
        native_name = adapter.tensors[tensor_name].row_mappings[0].native_name
        if not native_name.endswith(_SERVED) or ".experts." in native_name:
            raise adapter.error(f"the adapter `{name}` changes `{tensor_name}`, which all requests share", _ALONE)


_SERVED = (
    *("attention.qkv.weight", "attention.out.weight"),
    *("mlp.gate_up.weight", "mlp.up.weight", "mlp.down.weight"),
)
"""The native tensors that requests may have adapters of their own for."""


def _adapted_parameters(adapter: LoraAdapter) -> list[tuple[Parameter, list[RowMapping]]]:
    """Return the native tensors that an adapter changes, each with the mappings of all its rows."""
    mappings: dict[str, list[RowMapping]] = {}
    for tensor in adapter.tensors.values():
        for mapping in tensor.row_mappings:
            mappings.setdefault(mapping.native_name, []).append(mapping)
    return [
        (parameter, mappings[parameter.name])
        for parameter in parameters(adapter.config)
        if any(mapping.hf_name in adapter.adapted for mapping in mappings[parameter.name])
    ]


def _native_factors(
    adapter: LoraAdapter, parameter: Parameter, mappings: Sequence[RowMapping], module: Linear
) -> _NativeFactors:
    """Join the factors of the projections that a native tensor holds, in the order of the served weight's rows."""
    device = module.weight.device
    by_tensor = {
        name: adapter.factors(name)
        for name in dict.fromkeys(mapping.hf_name for mapping in mappings)
        if name in adapter.adapted
    }
    ranks = [factors.a.shape[0] for factors in by_tensor.values()]
    starts = dict(zip(by_tensor, [sum(ranks[:number]) for number in range(len(ranks))], strict=True))
    a = torch.cat([factors.a.float() for factors in by_tensor.values()]).to(device)
    b = torch.zeros(parameter.shape[0], a.shape[0], device=device)
    magnitude = torch.full((parameter.shape[0],), torch.nan, device=device)
    for mapping in mappings:
        if (factors := by_tensor.get(mapping.hf_name)) is None:
            continue
        native_rows = mapping.native_rows(0, mapping.rows)
        index = native_rows if isinstance(native_rows, slice) else torch.from_numpy(native_rows)
        rows = slice(mapping.hf_start, mapping.hf_start + mapping.rows)
        first = starts[mapping.hf_name]
        b[index, first : first + factors.a.shape[0]] = (factors.b[rows].float() * factors.scale).to(device)
        if factors.magnitude is not None:
            magnitude[index] = factors.magnitude[rows].float().to(device)
    if not bool(a.isfinite().all() and b.isfinite().all()):
        raise adapter.error(f"its factors of `{parameter.name}` are not finite", "train it again, or fetch it again")
    if parameter.name.endswith("gate_up.weight"):
        b, magnitude = gates_first(b, 0), gates_first(magnitude, 0)
    if bool(magnitude.isnan().all()):
        return _NativeFactors(a, b, None)
    lengths = torch.linalg.norm(module.weight.float() + b @ a, dim=1)
    row_scale = torch.where(magnitude.isnan(), torch.ones_like(lengths), magnitude / lengths)
    return _NativeFactors(a, b * row_scale[:, None], row_scale)
