"""What a probe of ranks is asked to measure; no torch here: the measuring itself is `engines/torch/fabric_probe.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson


@dataclass(frozen=True)
class ProbeRequest:
    """What to measure."""

    kind: str
    """`cuda` or `cpu`."""
    mebibytes: tuple[float, ...]
    """Sizes of messages; empty: no all-reduce."""
    seconds: float
    """How long to measure each size."""
    products: bool = False
    """Measure bf16 products on every GPU."""
    timeout_seconds: float = 60.0
    """How long ranks wait for each other."""

    def to_text(self) -> str:
        """Return it as the probe's command line takes it."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_text(cls, text: str) -> ProbeRequest:
        """Read it back."""
        body = orjson.loads(text)
        return cls(**body | {"mebibytes": tuple(body["mebibytes"])})
