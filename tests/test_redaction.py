"""Addresses are shown without what lets their reader in, alone and inside texts that others wrote."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshed.errors import NotFound, TrainshedError
from trainshed.redaction import credentials_in, redacted, shown_address

SECRET = "planted-secret"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (f"https://host/a.jsonl?X-Amz-Signature={SECRET}", "https://host/a.jsonl?…"),
        (f"https://me:{SECRET}@host:8080/a", "https://host:8080/a"),
        (f"https://me:{SECRET}@[::1]:8080/a", "https://[::1]:8080/a"),
        (f"https://{SECRET}@host/a", "https://host/a"),
        (f"https://me:{SECRET}/x@host/a", "https://host/a"),
        (f"https://host/a#{SECRET}", "https://host/a"),
        (f"HTTPS://host?{SECRET}", "HTTPS://host?…"),
        (f"http:/me:{SECRET}@host/a", "http:/host/a"),
        (f"http:me:{SECRET}@host/a", "http:host/a"),
        (f"ftp://me:{SECRET}@host/a?{SECRET}", "ftp://host/a?…"),
        (f"s3://me:{SECRET}@bucket/a", "s3://bucket/a"),
        (f"az://account/container/a?sv=1&sig={SECRET}", "az://account/container/a?…"),
        (f"https://proxy/https://me:{SECRET}@host/a?b={SECRET}", "https://proxy/https://host/a?…"),
    ],
)
def test_an_address_is_shown_without_its_secrets(address: str, shown: str) -> None:
    assert shown_address(address) == shown
    assert shown_address(shown) == shown
    assert redacted(f"GET {address}: gone") == f"GET {shown}: gone"


@pytest.mark.parametrize(
    "address",
    [
        "corpus/part-?.jsonl",
        "a?b=c",
        "s3://bucket/part-?.jsonl",
        "s3://bucket/a#b@c",
        "hf://datasets/org/name@main/a",
        "https://host/a@b",
        "https://host:80/a",
        "recipe.yaml:12",
        "https://host/a?…:7",
    ],
)
def test_what_holds_no_secret_is_shown_as_it_is(address: str) -> None:
    assert shown_address(address) == address
    assert redacted(f"at {address}, and on") == f"at {address}, and on"
    assert credentials_in(address) is None


@pytest.mark.parametrize(
    ("address", "how"),
    [
        ("https://h/a?X-Amz-Credential=b&X-Amz-Signature=c", "X-Amz-Credential"),
        ("https://h/a?se=2026&sp=r&sig=c", "sig"),
        ("https://h/a?GoogleAccessId=a&Expires=1&Signature=c", "Signature"),
        ("https://h/a?access_token=c", "access_token"),
        ("https://h/a?download=true&key=c", "key"),
        ("https://me:c@h/a", "a user or password"),
        ("https://h/a?download=true", None),
        ("https://h/a?file=part-1&version=2", None),
    ],
)
def test_which_addresses_carry_credentials(address: str, how: str | None) -> None:
    found = credentials_in(address)
    assert found is None if how is None else found is not None and how in found


@given(st.text(max_size=40))
def test_any_text_can_be_redacted_and_nothing_changes_the_second_time(text: str) -> None:
    once = redacted(f"https://{text}")
    assert redacted(once) == once
    shown = shown_address(f"https://{text}")
    assert shown_address(shown) == shown


@given(st.text(st.characters(blacklist_categories=("Cc", "Cs", "Z")), min_size=1, max_size=20))
def test_no_query_survives(query: str) -> None:
    assert shown_address(f"https://host/a?{SECRET}{query}") == "https://host/a?…"


def test_an_error_never_holds_a_secret_of_an_address_whoever_writes_it() -> None:
    url = f"https://me:{SECRET}@host/a?X-Amz-Signature={SECRET}"
    error = NotFound(f"GET {url} failed", where=f"{url}", hint=f"try {url} again")
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again, TrainshedError(url)):
        assert SECRET not in str(each) + repr(each) + str(each.args) + str(vars(each))
    assert str(error) == "https://host/a?…: GET https://host/a?… failed\ntry https://host/a?… again"
