"""Copying a tree: `trainshed data fetch` beside `cp` on a disk, and beside boto3's transfer manager to and from S3.

    python benchmarks/data_fetch.py [--megabytes 1000] [--files 8] [--repeat 3]

The S3 server is the tests' own (a Ceph gateway on this machine, so both sides share its cores). Ours also hashes every
byte, keeps a journal and writes a manifest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from measure import Measured, measure, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.servers.s3_server import S3Server, missing_binaries, shared_server

BOTO3 = """
import sys, boto3, pathlib, concurrent.futures
direction, folder, bucket, prefix, endpoint = sys.argv[1:]
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
def up(path): client.upload_file(str(path), bucket, f"{prefix}/{path.name}")
def down(key): client.download_file(bucket, key, f"{folder}/{key.rsplit('/')[-1]}")
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    if direction == "up":
        list(pool.map(up, sorted(pathlib.Path(folder).iterdir())))
    else:
        listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix + "/")
        list(pool.map(down, [each["Key"] for each in listed["Contents"]]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        source = folder / "source"
        source.mkdir()
        for number in range(arguments.files):
            with (source / f"part-{number}").open("wb") as file:
                for _ in range(arguments.megabytes // arguments.files):
                    file.write(os.urandom(1_000_000))
        rows = disk(arguments, source, folder)
        if missing_binaries() or not importlib.util.find_spec("boto3"):
            print(f"no S3 part: it needs boto3 and {', '.join(missing_binaries()) or 'nothing else'}")
        else:
            with shared_server(folder / "server") as server:
                os.environ.update(server.environment())
                os.environ.update(AWS_ACCESS_KEY_ID=server.access_key, AWS_SECRET_ACCESS_KEY=server.secret_key)
                rows += bucket(arguments, source, folder, server)
    columns = ["copy", "ours s", "MB/s", "peer s", "MB/s", "ours / peer", "ours MiB", "peer MiB"]
    table(f"{arguments.megabytes} MB in {arguments.files} files, best of {arguments.repeat}", columns, rows)


def disk(arguments: argparse.Namespace, source: Path, folder: Path) -> list[list[str]]:
    ours, peer = folder / "ours", folder / "peer"
    return [
        _pair(
            "disk to disk, beside cp",
            arguments,
            lambda _: _fetch(source, ours),
            lambda _: ["sh", "-c", f"cp -r {source} {peer} && sync -f {peer}"],
            lambda: [shutil.rmtree(each, ignore_errors=True) for each in (ours, peer)],
        )
    ]


def bucket(arguments: argparse.Namespace, source: Path, folder: Path, server: S3Server) -> list[list[str]]:
    server.make_bucket("bench")
    ours, peer = folder / "ours", folder / "peer"

    def boto(direction: str, local: Path, prefix: str) -> list[str]:
        return [sys.executable, "-c", BOTO3, direction, str(local), "bench", prefix, server.endpoint]

    def fresh() -> None:
        for each in (ours, peer):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir()

    return [
        _pair(
            "disk to S3, beside boto3",
            arguments,
            lambda i: _fetch(source, f"s3://bench/ours-{i}"),
            lambda i: boto("up", source, f"peer-{i}"),
            fresh,
        ),
        _pair(
            "S3 to disk, beside boto3",
            arguments,
            lambda _: _fetch("s3://bench/ours-0", ours),
            lambda _: boto("down", peer, "peer-0"),
            fresh,
        ),
    ]


def _fetch(source: object, target: object) -> list[str]:
    return [sys.executable, "-m", "trainshed", "data", "fetch", str(source), str(target)]


def _pair(name, arguments, ours, peer, clean) -> list[str]:
    runs: tuple[list[Measured], list[Measured]] = ([], [])
    for round_number in range(arguments.repeat):
        clean()
        for done, command in zip(runs, (ours, peer), strict=True):
            done.append(measure(command(round_number)))
    one, other = (min(done, key=lambda each: each.seconds) for done in runs)
    rate = [f"{arguments.megabytes / each.seconds:.0f}" for each in (one, other)]
    return [
        name,
        *(f"{one.seconds:.2f}", rate[0], f"{other.seconds:.2f}", rate[1]),
        *(f"{other.seconds / one.seconds:.2f}x", f"{one.peak_mib:.0f}", f"{other.peak_mib:.0f}"),
    ]


if __name__ == "__main__":
    main()
