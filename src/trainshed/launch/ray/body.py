"""A job as the JSON body of Ray's REST API: `curl --data-binary @job.json http://head:8265/api/jobs/` submits it.

The job's files are written by the entrypoint into the run's folder, which every node mounts: the body is all there is
to read, and neither the submitting machine nor whoever runs the body by hand needs the `ray` wheel.
"""

from __future__ import annotations

import gzip
import io
import posixpath
import shlex
import tarfile
import zipfile
from base64 import b64encode

import orjson

from trainshed.errors import InputError
from trainshed.launch.fabric import fabric_setup
from trainshed.launch.job import Code, Job, job_folder

# Ray hands the entrypoint to `sh -c`, and Linux takes no argument longer than 128 KiB (MAX_ARG_STRLEN).
_MOST_ENTRYPOINT_BYTES = 128 * 1024 - 1
_PLAIN_BYTES = 16 * 1024  # longer files (a diff) are packed, so that what people read stays readable
_STOP_MARGIN_SECONDS = 60
JOB_NAME = "job_name"
"""The key of a job's metadata that Ray itself shows as its name."""


def job_body(job: Job) -> str:
    """Return the body of the POST; the same job gives the same bytes."""
    nodes = max(stage.nodes for stage in job.stages)
    runtime_env: dict[str, object] = {
        "env_vars": {
            **fabric_setup(job.cluster, nodes=nodes).environment,
            **job.cluster.environment,
            # Left to itself, `ray job stop` kills 3 s after TERM, in the middle of the last checkpoint.
            "RAY_JOB_STOP_WAIT_TIME_S": str(job.grace_seconds + _STOP_MARGIN_SECONDS),
        }
    }
    if job.code is not None:
        runtime_env["py_modules"] = [f"gcs://{package_name(job.code)}"]
    body = {
        "entrypoint": _entrypoint(job),
        # No submission_id: Ray gives one. A run that is submitted again would bring the same, and Ray (2.60) then takes
        # the end of the old job for that of the new.
        "metadata": {JOB_NAME: job.name, "run": job.run},
        "runtime_env": runtime_env,
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode() + "\n"


def package_name(code: Code) -> str:
    """Return our code's name among Ray's packages."""
    return f"_ray_pkg_{code.sha256[:32]}.zip"


def package_of(code: Code) -> bytes:
    """Repack our code as the zip file that Ray unpacks on every node and puts on PYTHONPATH."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(code.data)) as archive,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as package,
    ):
        for entry in archive:
            if (content := archive.extractfile(entry)) is not None:
                named = zipfile.ZipInfo(entry.name)  # with the first day that a zip file knows
                named.external_attr = 0o644 << 16
                named.compress_type = zipfile.ZIP_DEFLATED
                package.writestr(named, content.read())
    return packed.getvalue()


def _entrypoint(job: Job) -> str:
    folder = job_folder(job.run)
    lines = ["set -eu"]
    lines += [
        f"mkdir -p {shlex.quote(each)}"
        for each in sorted({posixpath.dirname(f"{folder}/{name}") for name in job.files})
    ]
    for name in sorted(job.files):
        path = f"{folder}/{name}"
        # Renamed into place: an earlier job of the run may still be reading them.
        lines.append(f"{_writing(job, name)} > {shlex.quote(path + '.new')}")
        lines.append(f"mv -f {shlex.quote(path + '.new')} {shlex.quote(path)}")
    # -P: a file of the user's named like one of Python's modules must not be taken for it.
    lines.append(f"exec {shlex.join([job.cluster.python, '-P', '-m', 'trainshed', 'ray-driver', '--job', folder])}")
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > _MOST_ENTRYPOINT_BYTES:
        largest = max(job.files, key=lambda name: len(job.files[name]))
        raise InputError(
            f"the job's files take {len(text.encode()) // 1024} KiB, and an entrypoint of Ray holds 127",
            where=largest,
            hint="make it shorter; what is large belongs into the store",
        )
    return text


def _writing(job: Job, name: str) -> str:
    """The shell command that prints a file."""
    text = job.files[name]
    if "\0" in text or "\0" in name:
        raise InputError("holds a NUL byte, which no shell can write", where=name, hint="write text only")
    if len(text.encode()) <= _PLAIN_BYTES:
        return f"printf %s {shlex.quote(text)}"
    packed = b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f"printf %s {packed} | base64 -d | gzip -d"
