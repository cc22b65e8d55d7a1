"""`trainshed image`: what jobs run in."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

app = App(name="image", help="What jobs run in: a container image, or an environment on a shared disk.")


@app.command
def build(
    tag: str | None = None,
    *,
    base: str | None = None,
    venv: str | None = None,
    on: str | None = None,
    python: str = "python3",
    out: Path | None = None,
    tool: str = "docker",
    push: bool = False,
) -> int:
    """Build the image that a cluster's jobs run in, or with --venv a Python environment on its shared disk.

    Parameters
    ----------
    tag
        Name of the image: registry/name:tag.
    base
        The image to build on, whose PyTorch is kept (default: NVIDIA's).
    venv
        Make an environment at this path in place of an image; it must be new.
    on
        A Slurm cluster: the environment is made on its login node.
    python
        The Python an environment is made with.
    out
        Write the Dockerfile (or the script) into this folder and build nothing.
    tool
        docker, podman or another program that takes the same words.
    push
        Push the image when it is built.
    """
    from trainshed.errors import InputError

    if (tag is None) == (venv is None):
        raise InputError("name one thing to build", hint="write registry/name:tag, or --venv /shared/path")
    if venv is not None:
        return _environment(venv, on, python, out)
    assert tag is not None
    return _image(tag, base, out, tool, push)


def _image(tag: str, base: str | None, out: Path | None, tool: str, push: bool) -> int:
    import shutil
    import subprocess
    import tempfile

    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.launch.images import DEFAULT_BASE, build_commands, dockerfile

    text = dockerfile(base or DEFAULT_BASE)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "Dockerfile").write_text(text, encoding="utf-8")
        commands = build_commands(tag, str(out), tool=tool, push=push)
        reporter().note("written; build it with\n" + "\n".join("  " + " ".join(each) for each in commands))
        return 0
    if shutil.which(tool) is None:
        raise InputError(
            f"there is no `{tool}` on this machine", where="--tool", hint="write --out DIR and build it elsewhere"
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "Dockerfile").write_text(text, encoding="utf-8")
        for command in build_commands(tag, folder, tool=tool, push=push):
            code = subprocess.run(command, check=False).returncode
            if code:
                return 1
    reporter().note(f"built {tag}; write it into the cluster file, best by digest: `image: {tag}`")
    return 0


def _environment(venv: str, on: str | None, python: str, out: Path | None) -> int:
    import subprocess

    from trainshed.cli.console import reporter
    from trainshed.launch.images import environment_script
    from trainshed.recipe import load_cluster

    script = environment_script(venv, python)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "environment.sh").write_text(script, encoding="utf-8")
        reporter().note(f"written; run it where the disk is: bash {out / 'environment.sh'}")
        return 0
    login = load_cluster(on).on_slurm.login if on is not None else None
    command = ["ssh", "--", login, "bash", "-s"] if login else ["bash", "-s"]
    code = subprocess.run(command, input=script.encode(), check=False).returncode
    if code == 0:
        reporter().note(f"made; write it into the cluster file: `slurm: {{venv: {venv}}}`")
    return code
