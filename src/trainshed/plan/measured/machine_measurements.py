"""What `plan probe` measures on a machine; no torch here: the measuring itself is `engines/torch/machine_probe.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Gemm:
    """One shape of matrix product: `rows` tokens, times a weight of `inputs` x `outputs`.

    Called from Python, one behind the other, as an engine does without graphs: of small shapes the host is the limit.
    """

    rows: int
    inputs: int
    outputs: int
    dtype: str
    tflops: float


@dataclass(frozen=True)
class AttentionRate:
    """Causal attention over one shape; FLOPs counted as causal, backward as 2.5 times the forward."""

    sequence_length: int
    heads: int
    head_dim: int
    dtype: str
    forward_tflops: float
    backward_tflops: float


@dataclass(frozen=True)
class AllReduce:
    """One message size: `bus_gb_per_s` is 2 (n - 1) / n of the message per second, as nccl-tests count."""

    ranks: int
    mebibytes: float
    seconds: float
    bus_gb_per_s: float


@dataclass(frozen=True)
class MachineMeasurements:
    """One machine as it was measured."""

    device: str
    """What the driver calls the GPU; the processor's name where there is none."""
    kind: str
    """`cuda` or `cpu`."""
    devices: int
    """GPUs of the machine; 1 for a CPU."""
    memory_gib: float
    """Memory of one device."""
    host_memory_gib: float
    cpus: int
    torch: str
    gemms: tuple[Gemm, ...]
    attention: tuple[AttentionRate, ...]
    copy_gb_per_s: float
    """Reading and writing together."""
    launch_us: float
    """Between two of the smallest kernels, one behind the other."""
    all_reduces: tuple[AllReduce, ...]
    """Empty with one GPU."""
    fabric: str | None = None
    """The network cards that were found, by the fabric's name in the catalog; nothing was sent over them."""
    network_gbps: float | None = None
    """Line rate of those cards together, 10^9 bits a second."""

    def best_tflops(self, dtype: str) -> float | None:
        """Return the fastest product of a dtype, None where it was not measured."""
        return max((gemm.tflops for gemm in self.gemms if gemm.dtype == dtype), default=None)

    @property
    def bus_gb_per_s(self) -> float | None:
        """The best bus bandwidth among the machine's own devices."""
        return max((one.bus_gb_per_s for one in self.all_reduces), default=None)

    def to_plain(self) -> dict[str, Any]:
        """Return the measurements as JSON has them."""
        return asdict(self)
