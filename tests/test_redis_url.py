"""URLs of Redis: what they name, and that a password stays in them."""

import pytest

from lmc.config.redis_url import Address, parse_redis_url


def test_a_plain_url_is_a_single_host() -> None:
    remote = parse_redis_url("redis://cache.example:7000/3")
    assert (remote.kind, remote.hosts, remote.db, remote.tls) == ("single", (Address("cache.example", 7000),), 3, False)
    assert parse_redis_url("redis://cache.example").hosts == (Address("cache.example", 6379),)


def test_logins_are_unquoted_and_never_shown() -> None:
    remote = parse_redis_url("redis://lmc:p%40ss%2Fword@host")
    assert (remote.username, remote.password) == ("lmc", "p@ss/word")
    assert parse_redis_url("redis://:secret@host").username is None
    assert "p@ss" not in repr(remote) + str(remote)
    assert str(remote) == "Redis at host:6379"


def test_tls_takes_its_options_from_the_query() -> None:
    remote = parse_redis_url("rediss://host?ssl_ca_certs=/ca.pem&ssl_check_hostname=false")
    assert remote.tls
    assert dict(remote.options) == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}


def test_a_unix_socket_is_a_path() -> None:
    remote = parse_redis_url("unix:///run/redis.sock?db=2")
    assert (remote.kind, remote.path, remote.db, str(remote)) == (
        "unix",
        "/run/redis.sock",
        2,
        "Redis at /run/redis.sock",
    )


def test_clusters_and_sentinels_have_several_hosts() -> None:
    cluster = parse_redis_url("redis-cluster://a:1,b:2,[::1]:3")
    assert cluster.hosts == (Address("a", 1), Address("b", 2), Address("::1", 3))
    assert str(cluster) == "Redis at a:1, b:2, [::1]:3"
    sentinel = parse_redis_url("rediss-sentinel://:pw@a,b:2/mymaster/4")
    assert sentinel.hosts == (Address("a", 26379), Address("b", 2))
    assert (sentinel.service, sentinel.db, sentinel.tls) == ("mymaster", 4, True)


@pytest.mark.parametrize("url", ["", "redis://", "http://host", "redis://host,", "redis:///0", "redis://u:p@h@x:1:2"])
def test_anything_else_is_an_error_without_the_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"^no URL of a Redis$"):
        parse_redis_url(url)
