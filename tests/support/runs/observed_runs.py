"""Run folders as a training leaves them, without one: every event passes the schema, and the clock is ours."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from trainshed.observe.event_log import SEGMENT_BYTES, events_folder
from trainshed.observe.events import encode_event
from trainshed.plan.layout import RankLayout
from trainshed.run_folder import plan_file, run_path
from trainshed.storage import LocalStore

BEGAN = 1_780_000_000.0
TOKENS_PER_STEP = 256 * 8192
"""People look at these figures in pictures: with 2 s a step, 128 H100 and Llama 3.1 8B they give the MFU below."""
RECIPE = """\
trainshed: 1
name: {name}
model: {{preset: tiny, init: random}}
data: {{synthetic: true, sequence_length: 256}}
train:
  steps: {steps}
  global_batch: 1024
  optimizer: {{lr: 3.0e-4}}
"""


def rank_layout(*, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, dp: int = 1) -> RankLayout:
    return RankLayout(
        tp=tp,
        pp=pp,
        vp=1,
        cp=cp,
        ep=ep,
        etp=1,
        dp=dp,
        replicate=1,
        shard="zero1",
        micro_batch=1,
        recompute="none",
        schedule="1f1b" if pp > 1 else None,
        stages=(4,) * pp,
    )


@dataclass
class ObservedRun:
    """A run whose events are appended to its folder, as a rank would."""

    store: Path
    name: str = "llama-tech"
    id: str = "0a1b2c3d"
    attempt: int = 1
    now: float = BEGAN
    _segment: int = 1

    @property
    def folder(self) -> Path:
        return run_path(self.store, self.name, self.id)

    def emit(
        self, kind: str, step: int | None = None, *, rank: int | None = 0, after: float = 0.0, **values: Any
    ) -> None:
        self.now += after
        event = orjson.loads(encode_event(kind, step, values, attempt=self.attempt, rank=rank)) | {"time": self.now}
        self.append(orjson.dumps(event) + b"\n")

    def append(self, lines: bytes) -> None:
        path = self.folder / events_folder("", self.attempt) / f"{self._segment:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines)
            if file.tell() > SEGMENT_BYTES:
                self._segment += 1

    def write(self, name: str, content: str | bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def begin(self, layout: RankLayout | None = None, *, hosts: list[str] | None = None, **plan: Any) -> None:
        """Begin an attempt: its number, its plan, the phases of its start."""
        layout = layout or rank_layout()
        record = {"attempt": self.attempt, "host": "elsewhere", "pid": 1, "time": self.now}
        self.write(f"attempts/{self.attempt:04d}.json", orjson.dumps(record))
        body = {"schema": "trainshed.plan/1", "attempt": self.attempt, "layout": asdict(layout), "reasons": [], **plan}
        LocalStore(self.folder).put(plan_file(self.attempt), orjson.dumps(body))
        for name, seconds in (("rendezvous", 4.0), ("process_groups", 11.0), ("load", 38.0), ("compile", 52.0)):
            self.emit("phase", name=name, seconds=seconds, after=seconds)
        self.emit(
            "start",
            run=f"{self.name}/{self.id}",
            layout=str(layout),
            world_size=layout.world_size,
            versions={"trainshed": "0.9.0", "torch": "2.12.0"},
            device="NVIDIA H100 80GB HBM3",
            parameters=8_030_261_248,
            hosts=hosts,
        )

    def step(self, step: int, *, loss: float | None = None, seconds: float = 2.0, **values: Any) -> None:
        noise = math.sin(step * 12.9898) * 43758.5453 % 1 - 0.5
        wanted: dict[str, Any] = {
            "loss": 1.9 + 8.9 * math.exp(-step / 260) + 0.12 * noise if loss is None else loss,
            "grad_norm": 0.35 + 2.5 * math.exp(-step / 90) + 0.2 * abs(noise),
            "lr": 3e-4 * min(1.0, (step + 1) / 100) * (0.55 + 0.45 * math.cos(step / 640)),
            "tokens": (step + 1) * TOKENS_PER_STEP,
            "step_seconds": seconds * (1 + 0.03 * noise),
            "tokens_per_second_per_gpu": TOKENS_PER_STEP / seconds / 128 * (1 - 0.03 * noise),
            "mfu": 0.426 * (1 - 0.03 * noise),
            "mfu_full_attention": 0.480 * (1 - 0.03 * noise),
            "batch_hash": "0" * 8,
            "skipped": False,
            "memory_gib": 61.2 + 0.4 * noise,
        }
        self.emit("step", step, after=seconds, **(wanted | values))

    def ranks(self, step: int, world_size: int, *, slow: dict[int, float] | None = None) -> None:
        """Write what the ranks and their devices did up to a step; `slow` are factors of single ranks."""

        def spread(rank: int, share: float) -> float:
            noise = math.sin((rank + 1) * 78.233 + step) * 43758.5453 % 1
            return 1 + share * (noise - 0.5)

        factors = slow or {}
        compute = [1.52 * spread(rank, 0.05) * factors.get(rank, 1.0) for rank in range(world_size)]
        longest = max(compute)
        wait = [longest - seconds + 0.05 for seconds in compute]
        memory = [61.0 * spread(rank, 0.12) for rank in range(world_size)]
        self.emit("ranks", step, steps=50, compute_seconds=compute, wait_seconds=wait, memory_gib=memory)
        self.emit(
            "devices",
            temperature_celsius=[58 * spread(rank, 0.25) * factors.get(rank, 1.0) ** 0.5 for rank in range(world_size)],
            power_watts=[610 * spread(rank, 0.1) for rank in range(world_size)],
            utilization=[0.97 * spread(rank, 0.04) for rank in range(world_size)],
            memory_gib=memory,
            throttled=["temperature" if factors.get(rank, 1.0) > 1.3 else None for rank in range(world_size)],
        )

    def checkpoint(self, step: int, *, size: int = 112_000_000_000) -> None:
        self.emit("checkpoint", step, phase="staged", seconds=3.1, stall_seconds=1.2, after=1.2)
        path = f"checkpoints/step-{step:08d}"
        self.emit("checkpoint", step, phase="committed", seconds=41.0, bytes=size, path=path, after=2.0)
        self.write(f"{path}/manifest.json", "{}")
        self.write("checkpoints/latest", orjson.dumps({"format": 1, "step": step, "attempt": 1, "written_by": 1}))


def whole_run(
    store: Path, *, name: str = "llama-tech", id: str = "0a1b2c3d", steps: int = 1200, lift: float = 0.0
) -> ObservedRun:
    """A run with everything a page can show: stages, two attempts, an alarm, checkpoints, answers, logs, a verdict."""
    run = ObservedRun(store, name, id)
    layout = rank_layout(tp=4, pp=4, dp=8)
    hosts = [f"gpu-{number:02d}" for number in range(16)]
    run.write("recipe.yaml", RECIPE.format(name=name, steps=steps))
    run.attempt = 0
    run.emit("stage", rank=None, name="fetch", state="skipped", what="weights are here and proven")
    run.emit("stage", rank=None, name="prepare", state="started")
    run.emit(
        "stage", rank=None, name="prepare", state="done", seconds=410.0, what="1.2B tokens in 8 shards", after=410.0
    )
    run.attempt = 1
    predicted = {"step_seconds": 1.94, "mfu": 0.43, "memory_gib": 63.5, "step_seconds_range": [1.80, 2.15]}
    run.begin(layout, hosts=hosts, predicted=predicted)
    prompts = ("What is a pipeline bubble?", "Say hello in French.")
    for step in range(steps):
        if step == steps // 2:
            run.emit(
                "failure",
                rank=None,
                ranks=[37],
                collective="all_reduce",
                what="rank 37 on gpu-04 died of SIGKILL",
                after=5,
            )
            run.emit("end", reason="failed", exit_code=1)
            run.attempt, run.now, run._segment = 2, run.now + 240, 1
            run.begin(layout, hosts=hosts, predicted=predicted)
            saved = step - step % 100
            run.emit("resume", saved, from_attempt=1, checkpoint=f"checkpoints/step-{saved:08d}", seconds=12.0)
            for repeated in range(saved, step):
                run.step(repeated)
        spike = 1.9 if step == steps * 3 // 4 else 0.0
        run.step(step, **({"loss": 4.2} if spike else {"z_loss": 0.001 * (1 + lift)}))
        if spike:
            run.emit("alarm", step, name="loss_spike", what=f"loss 4.2000 at step {step}, 12 deviations over its mean")
        done = step + 1
        if done % 50 == 0:
            run.ranks(step, layout.world_size, slow={77: 1.38} if done > steps // 2 else None)
        if done % 100 == 0:
            run.emit(
                "validation", done, loss=1.98 + lift + 8.9 * math.exp(-step / 260), batches=20, seconds=9.0, after=9.0
            )
            run.checkpoint(done)
            answer = "A stage waits for the others." if done > steps // 2 else "the the pipeline of of"
            answers = [
                {"prompt": prompt, "answer": answer, "tokens": [1, 2], "ended": done > 300} for prompt in prompts
            ]
            run.emit("answers", done, answers=answers)
    run.emit(
        "alarm",
        steps - 1,
        name="straggler",
        what="rank 77 on gpu-09 computes 38% longer than the others",
        ranks=[77],
        hosts=["gpu-09"],
    )
    run.emit("end", reason="finished", exit_code=0)
    for attempt in (1, 2):
        for rank in (0, 37):
            lines = "".join(f"step {number}/{steps}  loss {3 - number / steps:.4f}\n" for number in range(1, steps, 7))
            run.write(
                f"logs/attempt-{attempt:04d}/rank-{rank:05d}.log",
                f"loading weights\n{lines}warning: clock is held down\n",
            )
    run.write("logs/prepare/part-0000.log", "1.2B tokens in 8 shards\n")
    verdict = {
        "schema": "trainshed.verdict/1",
        "passed": True,
        "tensors": {"compared": 291, "equal": 291, "first_difference": None, "dtype": "bf16"},
        "logits": {"ran": True, "max_difference": 0.0},
        "probe": {"loss": 2.0214},
        "versions": {"trainshed": "0.9.0", "torch": "2.12.0"},
    }
    run.write("export/verdict.json", orjson.dumps(verdict))
    return run
