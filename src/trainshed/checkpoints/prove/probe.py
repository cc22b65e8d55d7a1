"""The probe: the loss of base weights on a fixed batch, stored beside their manifest.

It is computed once when the weights are converted and again on a run's layout before step 0: weights that were read
wrongly, split wrongly or not at all give another loss. This module only stores and compares the loss.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from trainshed.data.sampling.sources import SyntheticSource
from trainshed.errors import CorruptData, NotFound
from trainshed.models.parameters import AddedRows
from trainshed.storage import LocalStore, Manifest, sha256_of
from trainshed.storage.manifest import MANIFEST

SCHEMA = "trainshed.probe/1"
PROBE = "probe.json"

BATCH_VERSION = 1
"""The version of the batch; a stored probe of another version is computed again."""
PROBE_ROWS, PROBE_TOKENS = 2, 64
"""The sequences of today's batch, and the tokens of each that have a loss."""


@dataclass(frozen=True)
class LossProbe:
    """A loss in nats per token over `probe_batch(vocab_size, sequence_length)`, computed in `precision`.

    `tokens` is the hash of that batch: only losses of the same batch are compared.
    """

    loss: float
    tokens: str
    vocab_size: int
    sequence_length: int
    precision: str
    batch_version: int = BATCH_VERSION

    @classmethod
    def measured(cls, loss: float, *, vocab_size: int, sequence_length: int, precision: str) -> LossProbe:
        """Return the probe of a loss on today's batch."""
        tokens = sha256_of(probe_batch(vocab_size, sequence_length).tobytes())
        return cls(loss, tokens, vocab_size, sequence_length, precision)

    def is_current(self, vocab_size: int) -> bool:
        """Whether it was computed on the batch that a run with this vocabulary uses today."""
        current = (BATCH_VERSION, vocab_size, PROBE_TOKENS)
        return (self.batch_version, self.vocab_size, self.sequence_length) == current


def probe_batch(vocab_size: int, sequence_length: int) -> np.ndarray:
    """Return the batch: int32 [2, sequence_length + 1], inputs and next tokens, the same on every machine."""
    source = SyntheticSource(vocab_size=vocab_size, sequence_length=sequence_length, seed=0, label="probe-1")
    return source.read(np.arange(PROBE_ROWS)).tokens


def probe_file(added: AddedRows | None) -> str:
    """Return the name of a probe's file: with added tokens, weights have another loss."""
    return PROBE if added is None else f"probe-with-{added.start}-{added.stop}.json"


def write_probe(folder: Path, probe: LossProbe, added: AddedRows | None = None) -> None:
    """Store a probe beside the manifest of an artefact, with the manifest's hash."""
    store = LocalStore(folder)
    body = {"schema": SCHEMA, "manifest": Manifest.read(store, MANIFEST).sha256, **asdict(probe)}
    store.put(probe_file(added), json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n")


def read_probe(folder: Path, added: AddedRows | None = None) -> LossProbe | None:
    """Return the probe of an artefact, None where it has none (or one of another version)."""
    name = probe_file(added)
    store, where = LocalStore(folder), str(folder / name)
    try:
        body = json.loads(store.read(name))
        schema, manifest = body.pop("schema"), body.pop("manifest")
        probe = LossProbe(**body)
    except NotFound:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CorruptData("is not a probe", where=where, hint="remove it; it is computed again") from None
    if schema != SCHEMA or manifest != Manifest.read(store, MANIFEST).sha256:
        raise CorruptData("belongs to other weights", where=where, hint="remove it; it is computed again")
    return probe if probe.batch_version == BATCH_VERSION else None


def check_probe(measured: float, probe: LossProbe, bound: float) -> None:
    """Raise `CorruptData` unless a loss on the probe's batch is within `bound` of the stored one."""
    batch = probe_batch(probe.vocab_size, probe.sequence_length)
    if sha256_of(batch.tobytes()) != probe.tokens:
        raise CorruptData("the probe was computed on another batch", where=PROBE, hint="remove it")
    # Written so that a loss of NaN fails.
    if not abs(measured - probe.loss) <= bound:
        raise CorruptData(
            f"the base weights have a loss of {_shown(measured)} on the probe batch as they lie on this layout; "
            f"it was {_shown(probe.loss)} when they were converted (bound {bound:g})",
            hint="the weights were not read as they were written: `trainshed verify RECIPE` checks the layout",
        )


def _shown(loss: float) -> str:
    return f"{loss:.6f}" if math.isfinite(loss) else str(loss)
