"""Ready tokens in a bucket that only the cluster file knows the way to: every stage takes its `stores:`."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest
import yaml

from support.recipes.text_recipes import write_recipe
from support.servers.s3_server import S3Server
from trainshed.data.tokens.indexed_dataset import write_index
from trainshed.data.tokens.verify import verify_tokens
from trainshed.recipe import Cluster, Recipe, load_cluster, load_recipe
from trainshed.storage import StoreOptions, open_store
from trainshed.storage.manifest import Manifest
from trainshed.workflow import open_run, open_run_folder, prepare_run, store_options, train
from trainshed.workflow.remove import find_unneeded

pytestmark = pytest.mark.s3


@pytest.fixture
def bucket(s3_server: S3Server, no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket whose server no variable names: they hold the credentials alone."""
    environment = s3_server.environment()
    del environment["AWS_ENDPOINT_URL_S3"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return s3_server.make_bucket(f"bucket-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def cluster(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """This machine, with the server's address in `stores:`."""
    monkeypatch.chdir(tmp_path)
    stores = {"s3": {"endpoint": s3_server.endpoint}}
    (tmp_path / "here.yaml").write_text(yaml.safe_dump({"name": "here", "target": "local", "stores": stores}))
    return load_cluster("./here.yaml")


@pytest.fixture
def recipe(bucket: str, s3_server: S3Server, tmp_path: Path, cluster: Cluster) -> Recipe:
    """A recipe over 40 documents of 100 tokens in two shards of the bucket."""
    options = StoreOptions.from_mapping({"s3": {"endpoint": s3_server.endpoint}})
    for shard in range(2):
        name = f"theirs-{shard:05d}-of-00002"
        tokens = (np.arange(2000) * 7 + shard) % 200
        tokens.astype("<u2").tofile(tmp_path / f"{name}.bin")
        write_index(tmp_path / f"{name}.idx", np.dtype("<u2"), lambda: [np.full(20, 100, "<i4")])
        for suffix in ("bin", "idx"):
            store, path = open_store(f"s3://{bucket}/tokens/{name}.{suffix}", options)
            store.put(path, (tmp_path / f"{name}.{suffix}").read_bytes())
    source = f"{{tokens: 's3://{bucket}/tokens/theirs'}}"
    return load_recipe(str(write_recipe(tmp_path, source, tokenizer="null")))


def test_tokens_are_found_indexed_and_read_where_the_cluster_file_says(recipe: Recipe, cluster: Cluster) -> None:
    made = prepare_run(recipe, cluster)
    assert (made.sources[0].documents, made.sources[0].tokens) == (40, 4000)
    batch = made.order.batch(1).tokens
    assert np.array_equal(open_run(recipe, cluster).order.batch(1).tokens, batch)
    assert np.array_equal(open_run_folder(made.folder, cluster).order.batch(1).tokens, batch)
    (prefix,) = made.sources[0].prefixes
    (span, *_) = made.order.sources[0].document_spans(0, 0)
    assert span.file.startswith(prefix)
    assert all(shard.passed for shard in verify_tokens(prefix, options=store_options(cluster)))
    index = next(path for path in (made.folder.parents[2] / "artefacts" / "index").iterdir() if path.is_dir())
    assert str(index) not in [item.path for item in find_unneeded(made.folder.parents[2], store_options(cluster))]


def test_the_index_of_a_removed_run_is_not_needed_by_one_whose_tokens_are_in_a_bucket(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    made = prepare_run(recipe, cluster)
    store = made.folder.parents[2]
    stale = store / "artefacts" / "index" / ("0" * 32)
    stale.mkdir()
    (stale / "manifest.json").write_bytes(Manifest.of("index", {"content": "gone"}, []).to_bytes())
    assert str(stale) in [item.path for item in find_unneeded(store, store_options(cluster))]


def test_a_training_reads_its_tokens_where_the_cluster_file_says(recipe: Recipe, cluster: Cluster) -> None:
    prepare_run(recipe, cluster)
    assert train(recipe, cluster).is_complete
