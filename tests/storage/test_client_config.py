"""How clients are configured. Google and Azure are spoken to on loopback only as far as one GET goes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.servers.hub_server import HubServer
from trainshed.errors import AccessDenied, InputError, NotFound
from trainshed.storage import Endpoint, Retry, StoreOptions, open_store, parse
from trainshed.storage.client_config import az_config, client_options, gs_config, retry_config, s3_config
from trainshed.storage.object_store import scrub_secrets, translate_error

KEYS = {"AWS_ACCESS_KEY_ID": "AWSKEY", "AWS_SECRET_ACCESS_KEY": "aws-secret"}
MINIO = {
    "BUCKET_STORAGE_HOST": "http://minio:80",
    "BUCKET_STORAGE_ACCESS_KEY": "MINIOKEY",
    "BUCKET_STORAGE_SECRET_KEY": "minio-secret",
}


@pytest.mark.parametrize(
    ("endpoint", "environ", "expected", "key"),
    [
        (None, KEYS, None, "AWSKEY"),
        (None, {**KEYS, "AWS_ENDPOINT_URL": "http://general"}, "http://general", "AWSKEY"),
        (
            None,
            {**KEYS, "AWS_ENDPOINT_URL": "http://general", "AWS_ENDPOINT_URL_S3": "http://s3/"},
            "http://s3",
            "AWSKEY",
        ),
        ("http://said", {**KEYS, **MINIO, "AWS_ENDPOINT_URL_S3": "http://s3"}, "http://said", "AWSKEY"),
        (None, MINIO, "http://minio:80", "MINIOKEY"),
        (None, {**KEYS, **MINIO}, "http://minio:80", "MINIOKEY"),
        (None, {**MINIO, "BUCKET_STORAGE_HOST": "minio:9000"}, "http://minio:9000", "MINIOKEY"),
        ("http://minio:80", {**KEYS, **MINIO}, "http://minio:80", "MINIOKEY"),
    ],
)
def test_the_order_in_which_an_endpoint_is_looked_for(
    tmp_path: Path, endpoint: str | None, environ: dict[str, str], expected: str | None, key: str
) -> None:
    config, _ = s3_config("bucket", Endpoint(endpoint=endpoint), {**environ, "HOME": str(tmp_path)})
    assert config.get("endpoint") == config.get("aws_endpoint_url_s3") == expected
    assert config["access_key_id"] == key
    assert config["region"] == "us-east-1"


def test_addressing_and_region(tmp_path: Path) -> None:
    environ = {**KEYS, "HOME": str(tmp_path), "AWS_DEFAULT_REGION": "eu-west-1"}
    options = Endpoint(endpoint="https://objects.example", addressing="virtual")
    config, _ = s3_config("bucket", options, environ)
    assert config["endpoint"] == "https://bucket.objects.example"
    assert config["virtual_hosted_style_request"] is True
    assert config["region"] == "eu-west-1"
    config, _ = s3_config("bucket", Endpoint(region="us-west-2", addressing="virtual"), environ)
    assert (config["region"], config["virtual_hosted_style_request"]) == ("us-west-2", True)


def test_plain_http_only_where_the_endpoint_says_so() -> None:
    assert client_options("http://minio", Retry())["allow_http"]
    assert not client_options("https://minio", Retry())["allow_http"]
    assert not client_options(None, Retry())["allow_http"]
    assert retry_config(Retry(attempts=5))["max_retries"] == 4


def test_a_public_bucket_needs_no_credentials(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    config, _ = s3_config("bucket", Endpoint(anonymous=True), environ)
    assert config["skip_signature"] is True
    assert gs_config(Endpoint(anonymous=True), {})["skip_signature"] is True
    assert az_config("account", Endpoint(anonymous=True)) == {"account_name": "account", "skip_signature": True}


def test_an_endpoint_without_credentials_is_an_error_before_any_request(tmp_path: Path) -> None:
    with pytest.raises(AccessDenied, match="set AWS_ACCESS_KEY_ID"):
        s3_config("bucket", Endpoint(endpoint="http://minio"), {"HOME": str(tmp_path)})


def test_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)  # as where it is not installed
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text("[default]\naws_access_key_id=D\naws_secret_access_key=d-secret\n")
    (folder / "config").write_text("[default]\nregion=eu-north-1\n[profile sso]\nsso_session=x\nsso_account_id=1\n")
    environ = {"HOME": str(tmp_path)}
    config, _ = s3_config("bucket", Endpoint(), environ)
    assert (config["access_key_id"], config["region"]) == ("D", "eu-north-1")
    config, _ = s3_config("bucket", Endpoint(), {**environ, **KEYS})
    assert config["access_key_id"] == "AWSKEY", "the environment comes first"
    identity = {**environ, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
    config, _ = s3_config("bucket", Endpoint(), identity)
    assert "access_key_id" not in config, "a pod's identity comes before a file in its image"
    with pytest.raises(AccessDenied, match=r"'nope', which ~/\.aws does not have"):
        s3_config("bucket", Endpoint(), {**environ, "AWS_PROFILE": "nope"})
    with pytest.raises(AccessDenied, match="pip install boto3"):
        s3_config("bucket", Endpoint(), {**environ, "AWS_PROFILE": "sso"})
    (folder / "config").write_text("no section")
    with pytest.raises(AccessDenied, match="not a readable AWS configuration"):
        s3_config("bucket", Endpoint(), environ)


def test_options_come_from_a_mapping_by_scheme_or_bucket() -> None:
    options = StoreOptions.from_mapping(
        {"s3": {"endpoint": "http://minio", "region": "x"}, "s3://public/": {"anonymous": True}}
    )
    assert options.endpoint_for(parse("s3://mine/x")).endpoint == "http://minio"
    assert options.endpoint_for(parse("s3://public/x")) == Endpoint(anonymous=True)
    assert options.endpoint_for(parse("gs://mine/x")) == Endpoint()
    with pytest.raises(InputError, match="unknown key 'endpont'"):
        StoreOptions.from_mapping({"s3": {"endpont": "x"}})
    with pytest.raises(InputError, match="write https://minio"):
        Endpoint(endpoint="minio")
    with pytest.raises(InputError, match="addressing: path"):
        Endpoint(addressing="dns")


def test_google_reads_one_object_from_an_endpoint(hub: HubServer) -> None:
    hub.pages["/bucket/folder/x"] = b"from google"
    options = StoreOptions({"gs": Endpoint(endpoint=hub.url, anonymous=True)}, Retry(2, 0.001, 0.002))
    store = open_store("gs://bucket", options)[0]
    assert store.read("folder/x") == b"from google"
    assert store.head("folder/x").size == 11
    with pytest.raises(NotFound):
        store.read("nope")
    hub.pages["/bucket/denied"] = b""
    from support.servers.hub_server import Fault

    hub.faults["/bucket/denied"] = Fault(9, status=403)
    with pytest.raises(AccessDenied, match="gcloud auth"):
        store.read("denied")


def test_azure_reads_one_object_from_an_endpoint(hub: HubServer) -> None:
    hub.pages["/container/folder/x"] = b"from azure"
    options = StoreOptions({"az": Endpoint(endpoint=hub.url, anonymous=True)}, Retry(2, 0.001, 0.002))
    store = open_store("az://account/container", options)[0]
    assert store.read("folder/x", 5) == b"azure"
    with pytest.raises(NotFound):
        store.read("nope")


def test_a_message_never_holds_a_signature_or_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=2026&sig=abcdef")
    text = "Error performing GET https://user:pw@a.blob/x?sig=abcdef&x=1 - with sv=2026&sig=abcdef inside"
    assert scrub_secrets(text) == "Error performing GET https://a.blob/x?… - with … inside"
    error = translate_error(OSError(text), "az://a/c/x", "az")
    assert "abcdef" not in str(error)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("status code: 301 Moved: <Code>PermanentRedirect</Code>", "StorageError", "set AWS_REGION"),
        ("PUT http://169.254.169.254/latest/api/token", "AccessDenied", "no credentials were found"),
        ("status code: 403 Forbidden: <Code>RequestTimeTooSkewed</Code>", "AccessDenied", "clock"),
        ("status code: 403 Forbidden: <Code>ExpiredToken</Code>", "AccessDenied", "sign in again"),
        ("status code: 503 Slow: <Code>SlowDown</Code>", "StorageError", "SlowDown"),
    ],
)
def test_faults_in_our_own_words(text: str, kind: str, words: str) -> None:
    error = translate_error(OSError(f"Generic S3 error: {text}"), "s3://b/x", "s3")
    assert type(error).__name__ == kind
    assert words in str(error)
