"""The driver as one file that any Python from 3.8 on runs: `python3 -I driver.pyz`.

The file is a zip of the modules that the driver consists of, as they are in this package. They import nothing but each
other and the standard library; a test holds that still. So the driver needs neither our code nor our dependencies in
its image, and starts at once.
"""

from __future__ import annotations

import zipfile
from functools import cache
from io import BytesIO
from pathlib import Path

import trainshed

PROGRAM_FILE = "driver.pyz"
DRIVER_MODULES = (
    "errors.py",
    "launch/kubernetes/api.py",
    "launch/kubernetes/conditions.py",
    "launch/kubernetes/driver.py",
    "launch/kubernetes/kinds.py",
    "launch/kubernetes/status.py",
    "launch/stage_state.py",
    "redaction.py",
    "reporting.py",
)
"""Paths in our package."""
_MAIN = "import sys\n\nfrom trainshed.launch.kubernetes.driver import main\n\nsys.exit(main())\n"
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


@cache
def driver_program() -> bytes:
    """Return the file; the same modules give the same bytes."""
    package = Path(trainshed.__file__).parent
    files = {f"trainshed/{name}": (package / name).read_bytes() for name in DRIVER_MODULES}
    for folder in ("trainshed", "trainshed/launch", "trainshed/launch/kubernetes"):
        files[f"{folder}/__init__.py"] = b""
    files["__main__.py"] = _MAIN.encode()
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _FIXED_TIME)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED, 9)
    return buffer.getvalue()
