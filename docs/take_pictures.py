"""Take the pictures of the documentation from the real commands: run them in a terminal, keep the screen as SVG.

pip install 'trainshed[docs]' && python docs/take_pictures.py [demo|launch|watch]
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 118, 90
IMAGES = Path(__file__).parent / "images"
COLOURS = {"default": None, "brown": "yellow", "brightbrown": "bright_yellow"}


def screen_of(commands: list[list[str]], folder: str, pause_seconds: float = 0.0) -> list[Text]:
    """Run commands one after another in one terminal, with a pause between them; return its lines."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    for number, command in enumerate(commands):
        time.sleep(pause_seconds if number else 0.0)
        shown = " ".join(["trainshed", *command])
        stream.feed(f"\x1b[1m$ {shown}\x1b[0m\r\n".encode())
        _run([sys.executable, "-m", "trainshed", *command], folder, stream)
    rows = [_line(screen, y) for y in range(LINES)]
    while rows and not rows[-1].plain.strip():
        rows.pop()
    return rows


def _run(command: list[str], folder: str, stream: pyte.ByteStream) -> None:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    process = subprocess.Popen(command, cwd=folder, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:
            break
        if not data:
            break
        stream.feed(data)
    process.wait()
    os.close(parent)


def _line(screen: pyte.Screen, y: int) -> Text:
    cells = [screen.buffer[y][x] for x in range(COLUMNS)]
    while cells and cells[-1].data == " " and cells[-1].bg == "default":
        cells.pop()
    text = Text()
    for (colour, behind, bold), run in groupby(cells, key=lambda cell: (cell.fg, cell.bg, cell.bold)):
        style = Style(color=_colour(colour), bgcolor=_colour(behind), bold=bold)
        text.append("".join(cell.data for cell in run), style)
    return text


def _colour(name: str) -> str | None:
    if len(name) == 6 and all(digit in "0123456789abcdef" for digit in name):
        return f"#{name}"
    return COLOURS.get(name, name)


def take(name: str, title: str, commands: list[list[str]], folder: str, pause_seconds: float = 0.0) -> None:
    """Save one picture."""
    lines = screen_of(commands, folder, pause_seconds)
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)
    for line in lines:
        console.print(line, soft_wrap=True)
    IMAGES.mkdir(exist_ok=True)
    console.save_svg(str(IMAGES / f"{name}.svg"), title=title)
    print(f"{name}.svg: {len(lines)} lines")


def take_launch(folder: str) -> None:
    """A job on a real Slurm of four virtual nodes, as the tests start it (root, `slurm-wlm munge`)."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.clusters.slurm_cluster import shared_cluster

    Path(folder, "cluster.yaml").write_text(
        f"name: virtual\ntarget: slurm\nmachine: cpu\nstore: {folder}/store\nnodes: {{default: 2, max: 4}}\n"
        "limits: {cpu_stage_cpus: 2, cpu_stage_memory: 2Gi}\n"
        f"slurm: {{partition: main, venv: {sys.prefix}}}\n"
    )
    asked = ["quickstart", "--on", "cluster.yaml", "layout={dp: 2, tp: 2}", "export={format: hf}", "--yes"]
    with shared_cluster(Path(folder, "slurm")) as cluster:
        os.environ |= {"SLURM_CONF": cluster.conf, "XDG_STATE_HOME": f"{folder}/state"}
        subprocess.run(
            [sys.executable, "-m", "trainshed", "run", "quickstart", "train.steps=1", "train.schedule.warmup=0"],
            cwd=folder,
            check=True,
        )
        commands = [
            ["submit", *asked, "--nodes", "9"],
            ["submit", *asked],
            ["status", "quickstart"],
            ["logs", "quickstart", "--grep", "step [123]/"],
            ["status", "quickstart"],
        ]
        take("launch", "a job on Slurm", commands, folder, pause_seconds=22)
        subprocess.run([sys.executable, "-m", "trainshed", "cancel", "quickstart"], cwd=folder, check=True)


def take_watch(folder: str) -> None:
    """The quickstart in the middle of its training, in a terminal of the usual width."""
    global COLUMNS
    command = [sys.executable, "-m", "trainshed"]
    with subprocess.Popen([*command, "run", "quickstart"], cwd=folder, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and _step(folder) < 60:
            time.sleep(1)
        before, COLUMNS = COLUMNS, 90
        take("watch", "a live view of a run", [["watch", "quickstart", "--once"]], folder)
        COLUMNS = before
        subprocess.run([*command, "cancel", "quickstart"], cwd=folder, check=True)


def _step(folder: str) -> int:
    """How many steps the quickstart has done."""
    command = [sys.executable, "-m", "trainshed", "status", "quickstart", "-o", "json"]
    asked = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return (json.loads(asked.stdout).get("progress") or {}).get("step") or 0


def main() -> None:
    """Take them all, or those that are named."""
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:] == ["launch"]:
            take_launch(folder)
            return
        if sys.argv[1:] == ["watch"]:
            take_watch(folder)
            return
        if sys.argv[1:] == ["demo"]:
            take("demo", "make demo", [["run", "quickstart"]], folder)
            return
    with tempfile.TemporaryDirectory() as folder:
        take("demo", "make demo", [["run", "quickstart"]], folder)
        # A short name for the picture; the real one has a hash in it.
        Path(folder, "demo").symlink_to(next(Path(folder, "store/artefacts/tokens").iterdir()))
        inspect = [["data", "inspect", "demo/tokens"], ["data", "verify", "demo/tokens"]]
        take("inspect", "a look inside", inspect, folder)
        take(
            "verify",
            "a layout against one process",
            [["verify", "quickstart", "--layout", "tp=2", "--steps", "6"]],
            folder,
        )
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(
            "name: my-run\nmodel: {preset: llama3.1-8b, init: random}\ntokenizer: hf://org/name\n"
            "data:\n  sequence_lenght: 8192\n  train: [{path: corpus/*.jsonl}]\n"
            "train: {steps: 1e3, global_batch: no, optimizer: {lr: 3e-4}}\n"
        )
        asked = (
            "--model llama3-70b --on gke-a3-mega --gpus 128 --engine megatron --precision fp8 --seq 8192 "
            "--global-batch 1024 --tokens 1T --top 4"
        )
        take("plan", "a plan", [["plan", *asked.split()]], folder)
        take("errors", "what, where, and what to write instead", [["run", "recipe.yaml"]], folder)
    with tempfile.TemporaryDirectory() as folder:
        take_watch(folder)
    with tempfile.TemporaryDirectory() as folder:
        take_launch(folder)


if __name__ == "__main__":
    main()
