"""A machine without a scheduler: the stages run one after the other, as `target: shell` of a cluster file."""

import subprocess

from trainshed.launch.script_target import ScriptTarget
from trainshed.launch.target import TARGETS, StageState


@TARGETS.register("shell")
class ShellTarget(ScriptTarget):
    """`target_options: {nice: 10}` leaves the machine to others."""

    def __init__(self, cluster, nice: int = 0):
        super().__init__(cluster)
        self.nice = nice

    def send(self, part, after):
        """Run the script of a stage to its end."""
        done = subprocess.run(["nice", "-n", str(self.nice), "bash"], input=part.text, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{part.stage} failed with exit code {done.returncode}")
        return part.name

    def status(self, submitted):
        """Say how each stage stands: whatever was sent has ended."""
        return tuple(StageState(stage, "done", "") for stage in submitted.ids)
