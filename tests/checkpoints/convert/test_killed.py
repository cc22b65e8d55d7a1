"""Conversions killed by a real SIGKILL at every stage, and run again: the same bytes, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.models.tiny_models import save_tiny_hf

# One process loads torch. A child for each place is killed there; then the same conversions are run to their end.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
from trainshed.checkpoints.hf import writer as hf_writer
from trainshed.checkpoints.convert.target import ConversionFolder
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.checkpoints.hf.writer import HfWeightsWriter
from trainshed.checkpoints.native import weights as native_weights
from trainshed.checkpoints.native.weights import NativeWeightsWriter

folder = Path(sys.argv[1])
hf_writer.SHARD_BYTES = native_weights.UNIT_BYTES = 20_000
targets = {"hf": TargetFormat("hf"), "native": TargetFormat("native"), "megatron": TargetFormat("megatron")}

def run(to, name):
    return convert_weights(str(folder / "source"), str(folder / name), targets[to], logits=False, workers=1)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def at(number, original):
    calls = []
    def counting(*arguments, **options):
        calls.append(1)
        return kill() if len(calls) == number else original(*arguments, **options)
    return counting

def after(original):
    def then(*arguments):
        original(*arguments)
        kill()
    return then

places = {
    "before the second marker": lambda: setattr(ConversionFolder, "mark", at(2, ConversionFolder.mark)),
    "in the third file": lambda: setattr(os, "preadv", at(24, os.preadv)),
    "after the tables": lambda: [setattr(w, "finish", after(w.finish)) for w in (HfWeightsWriter, NativeWeightsWriter)],
    "before the rename": lambda: setattr(ConversionFolder, "publish", at(1, ConversionFolder.publish)),
    "after the rename": lambda: setattr(ConversionFolder, "remove", at(1, ConversionFolder.remove)),
}
cases = [(to, place) for to in ("hf", "native") for place in places] + [("megatron", "in the third file")]
for number, (to, place) in enumerate(cases):
    child = os.fork()
    if child == 0:
        places[place]()
        run(to, str(number))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, (to, place)
    appeared = (folder / str(number)).exists()
    assert appeared == (place == "after the rename"), (to, place)
told = [(to, place, run(to, str(number)).kept) for number, (to, place) in enumerate(cases)]
for to in targets:
    run(to, f"whole-{to}")
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, str, int]]]:
    """What was made after each kill, what was made at once, and how much each second start found."""
    folder = tmp_path_factory.mktemp("killed")
    save_tiny_hf("llama", folder / "source", seed=1)
    done = subprocess.run([sys.executable, "-c", DRIVER, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    return folder, json.loads(done.stdout)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_wherever_it_is_killed_the_second_start_makes_the_same_bytes(
    killed: tuple[Path, list[tuple[str, str, int]]],
) -> None:
    folder, told = killed
    for number, (to, place, _) in enumerate(told):
        assert contents(folder / str(number)) == contents(folder / f"whole-{to}"), (to, place)
    assert not list(folder.glob(".*")), "nothing is left of what was killed"


def test_the_second_start_keeps_what_was_done(killed: tuple[Path, list[tuple[str, str, int]]]) -> None:
    for to, place, kept in killed[1]:
        if place == "before the second marker":
            assert kept == 1, to
        else:
            assert kept > 1, (to, place)
