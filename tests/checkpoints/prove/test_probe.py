"""The probe: one fixed batch, its loss kept beside the weights it belongs to, and compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainshed.checkpoints.prove.probe import PROBE, LossProbe, check_probe, probe_batch, read_probe, write_probe
from trainshed.errors import CorruptData
from trainshed.storage import FileEntry, LocalStore, Manifest, sha256_of


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    publish(tmp_path, b"weights")
    return tmp_path


def publish(folder: Path, content: bytes) -> None:
    entry = FileEntry("model.safetensors", len(content), sha256_of(content))
    Manifest.of("weights", {}, [entry]).write(LocalStore(folder), "manifest.json")


def measured(loss: float) -> LossProbe:
    return LossProbe.measured(loss, vocab_size=96, sequence_length=16, precision="float32")


def test_the_batch_is_the_same_for_ever() -> None:
    batch = probe_batch(50257, 7)
    assert batch.dtype == np.int32
    assert batch.tolist() == [
        [30609, 46784, 16079, 44545, 39949, 23582, 47633, 28392],
        [28157, 49844, 28577, 24837, 34588, 23686, 47193, 35317],
    ]
    assert np.array_equal(probe_batch(50257, 3), batch[:, :4]), "a longer batch begins with the shorter"


def test_the_batch_stays_inside_the_vocabulary() -> None:
    batch = probe_batch(96, 512)
    assert (batch.min(), batch.max()) == (0, 95)
    assert not np.array_equal(batch[0], batch[1])


def test_a_probe_is_kept_beside_the_manifest(artefact: Path) -> None:
    assert read_probe(artefact) is None
    write_probe(artefact, measured(4.5))
    assert read_probe(artefact) == measured(4.5)


def test_a_probe_of_other_weights_is_found_out(artefact: Path) -> None:
    write_probe(artefact, measured(4.5))
    publish(artefact, b"other weights")
    with pytest.raises(CorruptData, match="belongs to other weights"):
        read_probe(artefact)
    (artefact / PROBE).write_text("{}")
    with pytest.raises(CorruptData, match="is not a probe"):
        read_probe(artefact)


def test_a_probe_on_an_older_batch_is_computed_again(artefact: Path) -> None:
    write_probe(artefact, measured(4.5))
    body = json.loads((artefact / PROBE).read_text())
    (artefact / PROBE).write_text(json.dumps(body | {"batch_version": 0}))
    assert read_probe(artefact) is None


def test_a_loss_within_the_bound_passes_and_any_other_stops_the_run() -> None:
    check_probe(4.50001, measured(4.5), 1e-4)
    for loss in (4.6, float("nan"), float("inf")):
        with pytest.raises(CorruptData, match=rf"a loss of {loss:.1f}.* it was 4.500000 when"):
            check_probe(loss, measured(4.5), 1e-4)


def test_losses_on_two_batches_are_not_compared() -> None:
    other = LossProbe(4.5, sha256_of(b"other tokens"), 96, 16, "float32")
    with pytest.raises(CorruptData, match="on another batch"):
        check_probe(4.5, other, 1.0)
