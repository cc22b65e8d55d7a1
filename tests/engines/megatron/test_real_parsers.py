"""Every argument that is rendered goes through the real parser and validator of each version, without a GPU.

The table of what we and they accept and refuse is a golden file: models, layouts and precisions by version.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support.recipes.golden_files import check_golden
from support.recipes.megatron_tasks import megatron_task
from support.runs import megatron_parser
from support.runs.megatron_lm import SOURCE_VERSIONS, environment, unpacked
from trainshed.engines.launch import EngineLaunch
from trainshed.engines.megatron import megatron_launch
from trainshed.engines.megatron.arguments import DEFAULT_VERSION
from trainshed.errors import InputError

DENSE = ("gpt-375m", "llama3.1-8b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "mistral-7b-v0.1")
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "moonlight-16b-a3b")
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {"tp": 2, "recompute": "full"},
    "tp pp vp": {"tp": 2, "pp": 2, "vp": 2, "recompute": "selective"},
    "pp uneven": {"pp": 2, "stages": [5, 7]},
    "cp": {"cp": 2, "tp": 2},
    "full": {"shard": "full"},
    "ep": {"ep": 4},
    "tp ep": {"tp": 2, "ep": 2, "etp": 1},
}
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
OTHERS = (
    "train.batch_ramp={start: 128, increment: 64, samples: 4000}",
    "checkpoint={every: 10, async: false}",
    "checkpoint=off",
    "checkpoint.resume=must",
    "data={synthetic: true, sequence_length: 1024}",
    "data={sequence_length: 1024, train: [{path: a}], split: {train: 0.99, validation: 0.01}}",
    "train.schedule={name: wsd, warmup: 5, decay: 20, min_lr: 1.0e-6}",
    "train.deterministic=true",
    "train.optimizer.states=bf16",
    "budgets={load: 2h, step: 20m}",
    "observe={profile: {start: 3, ranks: [0, 1]}}",
)


def cases(*, whole: bool) -> dict[str, tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Models x layouts x precisions, and some other keys on one of them."""
    models = (*DENSE, *EXPERTS) if whole else ("gpt-375m", "llama3.1-8b", "mixtral-8x7b", "deepseek-v3")
    matrix = {
        f"{model} | {layout} | {precision}": (model, (f"train.precision={precision}",), LAYOUTS[layout])
        for model, layout, precision in product(models, LAYOUTS, PRECISIONS if whole else ("bf16",))
        if "ep" not in layout or model in EXPERTS
    }
    return matrix | {f"llama3.1-8b | {key}": ("llama3.1-8b", (key,), {"tp": 2}) for key in OTHERS}


def rendered(version: str, *, whole: bool) -> dict[str, EngineLaunch | str]:
    """The launch of each case, or why we refuse it."""
    launches: dict[str, EngineLaunch | str] = {}
    for name, (model, overrides, layout) in cases(whole=whole).items():
        wanted = dict(layout)
        if "stages" in wanted:
            task_layers = megatron_task(model).config.layers
            wanted["stages"] = [task_layers // 2 - 1, task_layers - task_layers // 2 + 1]
        length = () if any(key.startswith("data=") for key in overrides) else ("data.sequence_length=1024",)
        try:
            task = megatron_task(model, *length, *overrides, f"engine.version={version}", layout=wanted)
            launches[name] = megatron_launch(task)
        except InputError as error:
            launches[name] = error.what.splitlines()[-1].strip()
    return launches


def answers(version: str, launches: list[EngineLaunch], folder: Path) -> list[str | None]:
    """What the program itself says."""
    source = unpacked(version, folder)
    tasks = [
        {"world_size": 8, "arguments": launch.arguments, "environment": dict(launch.environment)} for launch in launches
    ]
    done = subprocess.run(
        [sys.executable, megatron_parser.__file__],
        input=json.dumps(tasks),
        env=environment(source, folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check_version(version: str, folder: Path, *, whole: bool) -> str:
    launches = rendered(version, whole=whole)
    ours = {name: launch for name, launch in launches.items() if isinstance(launch, EngineLaunch)}
    theirs = dict(zip(ours, answers(version, list(ours.values()), folder), strict=True))
    assert {name: error for name, error in theirs.items() if error is not None} == {}
    return "\n".join(
        f"{name} | {'accepted by both' if name in ours else f'refused here: {launches[name]}'}" for name in launches
    )


def test_the_default_version_takes_what_is_rendered_for_it(tmp_path: Path) -> None:
    assert "accepted" in check_version(DEFAULT_VERSION, tmp_path, whole=False)


@pytest.mark.full
@pytest.mark.parametrize("version", SOURCE_VERSIONS)
def test_every_version_takes_what_is_rendered_for_it(version: str, tmp_path: Path) -> None:
    check_golden(f"engines/megatron/parsers/{version}.txt", check_version(version, tmp_path, whole=True) + "\n")
