"""Requests of commands to servers: addresses, and keys that no error may show."""

import pytest
from http_stub import http_stub

from lmc.errors import InputError
from lmc.http.address import admin_token
from lmc.http.client import HttpClient, Refused, Unreachable, authorization, with_scheme


def test_addresses() -> None:
    assert with_scheme("host:1") == "http://host:1"
    assert with_scheme(":9180") == "http://127.0.0.1:9180", "where an engine listens that was given this"
    assert with_scheme("/run/lmc.sock") == "unix:///run/lmc.sock"
    assert with_scheme("https://host") == "https://host"


def test_an_address_with_an_open_bracket_is_one_clear_line() -> None:
    with pytest.raises(Unreachable, match=r"no server answers at http://\[::1 \(Invalid IPv6 URL\): is it running"):
        HttpClient("http://[::1").ask("/health")


def test_a_path_that_a_server_lacks_is_named_with_what_to_do() -> None:
    """The error was `Not Found` alone."""
    with http_stub((404, {"error": {"message": "Not Found"}})) as server:
        with pytest.raises(Unreachable) as error:
            HttpClient(server.url, hint="check the address").ask("/v1/models")
        assert str(error.value) == f"{server.url}/v1/models answered 404 Not Found: check the address"
        server.answers["/v1/models"] = 404, {"error": "model m does not exist"}
        with pytest.raises(Refused, match="model m does not exist"):
            HttpClient(server.url).ask("/v1/models")


def test_a_key_with_a_new_line_is_sent_without_and_another_wrong_one_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMC_ADMIN_TOKEN", "s3cret\n")
    assert admin_token() == "s3cret", "which servers want"
    assert authorization(admin_token()) == {"authorization": "Bearer s3cret"}
    with pytest.raises(InputError, match="LMC_ADMIN_TOKEN contains characters not allowed") as error:
        authorization("s3c\nret", "LMC_ADMIN_TOKEN")
    assert "s3c" not in str(error.value)
    monkeypatch.delenv("LMC_ADMIN_TOKEN")
    assert authorization(admin_token()) == {}
