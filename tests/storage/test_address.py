from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshed.errors import AddressError
from trainshed.storage import Address, join, parse

segment = st.text(
    st.characters(blacklist_categories=("Cc", "Cs"), blacklist_characters="/\x7f"), min_size=1, max_size=12
).filter(lambda text: text not in (".", ".."))
object_path = st.lists(segment, min_size=1, max_size=4).map("/".join)
bucket = st.from_regex(r"[a-z0-9][a-z0-9-]{2,40}", fullmatch=True)
hub_name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@given(scheme=st.sampled_from(["s3", "gs"]), bucket=bucket, path=object_path)
def test_a_bucket_address_keeps_every_character_of_its_path(scheme: str, bucket: str, path: str) -> None:
    address = parse(f"{scheme}://{bucket}/{path}")
    assert address == Address(scheme, bucket, path)
    assert str(address) == f"{scheme}://{bucket}/{path}"


@given(account=st.from_regex(r"[a-z0-9]{3,24}", fullmatch=True), container=bucket, path=object_path)
def test_an_azure_address_names_account_and_container(account: str, container: str, path: str) -> None:
    assert parse(f"az://{account}/{container}/{path}") == Address("az", f"{account}/{container}", path)


@given(
    kind=st.sampled_from(["", "datasets/", "spaces/"]),
    org=hub_name.filter(lambda name: name not in ("datasets", "spaces", "models")),
    name=hub_name,
    revision=st.text(st.characters(categories=("L", "N"), include_characters="._-/ "), max_size=20),
    path=st.just("") | object_path.filter(lambda text: not text.startswith("pr/")),
)
def test_a_hub_address_survives_being_written_and_read_again(
    kind: str, org: str, name: str, revision: str, path: str
) -> None:
    from trainshed.storage.address import hub_revision

    text = f"hf://{kind}{org}/{name}" + (f"@{hub_revision(revision)}" if revision else "")
    address = parse(join(text, path))
    assert address.url == text
    assert address.path == path
    assert parse(str(address)) == address


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_an_error_that_says_what_to_write(text: str) -> None:
    error: AddressError | None = None
    try:
        address = parse(text)
    except AddressError as caught:
        error = caught
    else:
        assert address.scheme == "file" or parse(str(address)) == address
    assert error is None or (error.hint and error.exit_code == 2)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("corpus/a.jsonl", Address("file", ".", "corpus/a.jsonl")),
        ("./corpus//a.jsonl", Address("file", ".", "corpus/a.jsonl")),
        ("../a", Address("file", ".", "../a")),
        (".", Address("file", ".", "")),
        ("/data/x/", Address("file", "/", "data/x")),
        ("file:///data/a%20b", Address("file", "/", "data/a b")),
        ("file://localhost/data", Address("file", "/", "data")),
        ("s3://bucket", Address("s3", "bucket", "")),
        ("s3://bucket/folder/", Address("s3", "bucket", "folder")),
        ("s3://bucket/*/[a-c]?.jsonl", Address("s3", "bucket", "*/[a-c]?.jsonl")),
        ("hf://org/name@refs/pr/7/a/b", Address("hf", "org/name@refs/pr/7", "a/b")),
        ("hf://models/org/name/x", Address("hf", "org/name", "x")),
        ("hf://datasets/org/name@refs/convert/parquet", Address("hf", "datasets/org/name@refs/convert/parquet", "")),
        ("https://host:8080/a//b?x=/y", Address("https", "host:8080", "a//b?x=/y")),
    ],
)
def test_what_each_way_of_writing_means(text: str, address: Address) -> None:
    assert parse(text) == address


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert parse("~/corpus") == Address("file", "/", "home/somebody/corpus")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "write a path"),
        ("s3:/bucket/x", "write s3://bucket/x"),
        ("s3:bucket/x", "write s3://bucket/x"),
        ("gcs://bucket/x", "write gs://bucket/path"),
        ("abfss://c@a.dfs.core.windows.net/x", "write az://account/container/path"),
        ("ftp://host/x", "write one of s3://"),
        ("s3://", "write s3://bucket/path"),
        ("s3://b!/x", "write s3://bucket/path"),
        ("s3://bucket/a//b", "write s3://bucket/a/b"),
        ("s3://bucket/../b", "write s3://bucket/b"),
        ("az://account", "write az://account/container/path"),
        ("hf://gpt2", "write hf://org/name"),
        ("hf://org/name@", "write hf://org/name"),
        ("http:///x", "write http://"),
        ("file://host/x", "write file:///absolute/path"),
        ("a\nb", "remove it"),
    ],
)
def test_a_bad_address_says_what_to_write(text: str, hint: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse(text)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAPLANTED:planted@bucket/x",
        "s3://bucket/x?X-Amz-Signature=planted",
        "az://account/container/x?sv=2026&sig=planted",
        "gs://bucket/x?X-Goog-Signature=planted",
        "hf://user:planted@org/name",
    ],
)
def test_a_bucket_address_with_credentials_is_refused_and_does_not_show_them(text: str) -> None:
    with pytest.raises(AddressError, match="credentials come from the environment") as caught:
        parse(text)
    assert "planted" not in str(caught.value).lower()


@pytest.mark.parametrize(
    "text", ["https:/me:planted@host/x", "ftp://me:planted@host/x?sig=planted", "http://me:planted@/x?a=planted"]
)
def test_what_is_wrong_with_an_address_is_said_without_its_secrets(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse(text)
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("root", "path", "whole"),
    [("s3://b", "x", "s3://b/x"), ("s3://b", "", "s3://b"), ("/", "x/y", "/x/y"), (".", "x", "x"), ("/a", "x", "/a/x")],
)
def test_joining_a_root_and_a_path(root: str, path: str, whole: str) -> None:
    assert join(root, path) == whole
