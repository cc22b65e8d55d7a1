"""Packages with kernels as a node without a GPU's driver imports them: not at all."""

from __future__ import annotations

from pathlib import Path


def packages_that_need_a_driver(folder: Path) -> Path:
    """A folder for PYTHONPATH: Transformer Engine as it fails in an image with Triton 3.2."""
    package = folder / "kernels" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import pytorch\n")
    (package / "pytorch.py").write_text(
        'raise RuntimeError("0 active drivers ([]). There should only be one.")  # what triton.autotune says\n'
    )
    return package.parent
