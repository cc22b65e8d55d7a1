"""`observe.profile` on foreign engines: which of its keys an engine has, and `nsys` where the engine only marks steps.

Megatron-LM, Megatron-Bridge and torchtune run PyTorch's profiler themselves. NeMo 24.07 marks the profiled steps by
cudaProfilerStart and cudaProfilerStop, which do nothing unless the rank was started by `nsys profile`: `NSYS_SCRIPT`
starts the ranks that the recipe names so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainshed.engines.launch import CpuStage, EngineTask
from trainshed.recipe import Profile, Recipe
from trainshed.recipe.section import Problem


def profiles(task: EngineTask) -> bool:
    """Whether a task profiles some steps."""
    return task.recipe.observe.profile is not None


def task_profile(task: EngineTask) -> Profile:
    """Return the profile that a task asks for; only called where it asks for one."""
    assert task.recipe.observe.profile is not None, "asked for a profile"
    return task.recipe.observe.profile


def profile_problems(
    recipe: Recipe, engine: str, absent: Mapping[str, str], *, own_warmup: int = 1
) -> Iterator[Problem]:
    """Yield what an engine does not have of `observe.profile`; `absent` says it, by key.

    `own_warmup` is for how many steps the engine warms its profiler up, where there are as many before.
    """
    profile = recipe.observe.profile
    if profile is None:
        return
    asked = {
        "cycles": profile.cycles > 1,
        "warmup": profile.warmup is not None and profile.warmup != min(own_warmup, profile.steps_before),
        "wait": profile.wait is not None and profile.wait_steps != profile.steps_before - profile.warmup_steps,
        "memory": profile.memory,
    }
    for key, what in absent.items():
        if asked[key]:
            yield Problem(("observe", "profile", key), f"{engine} {what}", "delete it, or write engine: torch")


ONCE_WITH_ONE_STEP_BEFORE = {
    "cycles": "runs its profiler once",
    "warmup": "warms its profiler up for one step",
    "memory": "records memory during the whole run, and writes a snapshot at every step that it logs",
}
"""What Megatron-LM and Megatron-Bridge, which took its code over, do not have of `observe.profile`."""

NSYS_SCRIPT = "nsys_rank.sh"
# Options as NVIDIA's own NeMo scripts have them. `--kill=none`: nsys would end the rank with its own session. A signal
# is for the rank, which saves a checkpoint and ends; nsys then writes what it has.
_NSYS_BODY = """\
#!/usr/bin/env bash
# Starts one rank of the job, written by Trainshed: those that observe.profile names under nsys.
set -euo pipefail
case " {ranks} " in
  *" $RANK "*) ;;
  *) exec "$@" ;;
esac
mkdir -p "$TRAINSHED_PROFILE"
report=$TRAINSHED_PROFILE/$(printf 'rank-%05d' "$RANK")
process=$(mktemp)
nsys=
interrupted=
stop() {{
  interrupted=1
  local rank
  rank=$(cat "$process")
  kill -TERM "${{rank:-$nsys}}" 2>/dev/null || true
}}
trap stop TERM
nsys profile -t cuda,nvtx -s none -c cudaProfilerApi --capture-range-end=stop --kill=none --force-overwrite=true \\
  {options}-o "$report" bash -c 'echo $$ >"$1"; shift; exec "$@"' rank "$process" "$@" &
nsys=$!
while true; do
  interrupted=
  code=0
  wait "$nsys" || code=$?
  [[ -n $interrupted ]] || break
done
rm -f "$process"
exit "$code"
"""
_NSYS_MISSING = (
    "error: observe.profile asks NeMo 24.07 for a profile, which nsys records, and this image has no nsys; "
    "delete observe.profile, or use an image with nsight-systems"
)


def nsys_script(profile: Profile) -> str:
    """Return the script that starts each rank, under nsys where the recipe names it."""
    options = (
        ("--cuda-memory-usage=true", profile.memory),
        ("--python-backtrace=cuda", profile.stacks),
    )
    chosen = "".join(f"{option} " for option, is_asked in options if is_asked)
    return _NSYS_BODY.format(ranks=" ".join(map(str, profile.ranks)), options=chosen)


def nsys_stage() -> CpuStage:
    """Return the stage that looks for nsys in the engine's image, before GPUs are asked for."""
    return CpuStage("nsys", ("bash", "-c", f"command -v nsys || {{ echo '{_NSYS_MISSING}' >&2; exit 2; }}"))
