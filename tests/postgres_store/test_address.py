"""What a URL may say, and that nothing secret of it is ever shown."""

from __future__ import annotations

import pytest

from agent_checkpoint import InvalidInputError, StateStore
from agent_checkpoint_postgres.address import Address, parse

SECRET = "hunter2"


def of(url: str) -> Address:
    return parse(url, 10)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:hunter2@db.example:5433/work", "postgresql://ann@db.example:5433/work?schema=agent_checkpoint"),
        ("postgres://db.example/work?schema=mine", "postgresql://db.example/work?schema=mine"),
        ("postgresql://db.example/work?user=ann&password=hunter2", "postgresql://ann@db.example/work?schema=agent_checkpoint"),
        ("postgresql://ann@one:1,two:2/work", "postgresql://ann@one:1,two:2/work?schema=agent_checkpoint"),
        ("postgresql://[::1]:5433/work", "postgresql://[::1]:5433/work?schema=agent_checkpoint"),
        ("postgresql:///work?host=/run/sql&port=1", "postgresql:///work?host=/run/sql&port=1&schema=agent_checkpoint"),
        ("postgresql://h/work?sslpassword=hunter2&passfile=/hunter2", "postgresql://h/work?schema=agent_checkpoint"),
    ],
)  # fmt: skip
def test_what_is_shown_names_the_place_without_a_secret(url: str, shown: str) -> None:
    assert of(url).shown == shown
    assert of(url).url == url
    assert of(shown).shown == shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hun@ter2@db/work",
        "postgresql://ann:hun/ter2@db/work",
        "postgresql://ann:1/hunter2@db/work",
        "postgresql://ann:hun?ter2@db/work",
        "postgresql://ann:hunter2%zz@db/work",
        "postgresql://ann:hunter2@db:port/work",
        "postgresql://ann:hunter2@db/work?pasword=hunter2",
        "postgresql://ann:hunter2@[db/work",
        "postgresql://ann:hunter2@db/work?pool_size=0",
        "postgresql://ann:hunter2@db/work?pool_size=1001",
        "postgresql://ann:hunter2@db/work?pool_size=%D9%A3",
        "postgresql://ann:hunter2@db/work?pool_size=",
        "postgresql://ann:hunter2@db/work?listen=yes",
        "postgresql://ann:hunter2@db/work?prepared_statements=1",
        "postgresql://ann:hunter2@db/work?schema=",
        "postgresql://ann:hunter2@db/work?schema=pg_catalog",
        "postgresql://ann:hunter2@db/work?schema=a%00b",
        "postgresql://ann:hunter2@db/work?schema=" + "a" * 64,
        "postgresql://ann:hunter2@db/work?schema=" + "%D1%8F" * 32,
    ],
)
def test_a_url_that_is_wrong_is_refused_without_repeating_a_secret(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        StateStore(url)
    error: BaseException | None = caught.value
    assert (caught.value.field, caught.value.exit_status) == ("database", 2)
    while error is not None:
        assert not any(part in f"{error} {error!r}" for part in (SECRET, "hun", "ter2"))
        error = error.__context__


def test_a_password_may_be_anything_that_is_percent_encoded() -> None:
    for password, encoded in (("a/b@c:d?e#f", "a%2Fb%40c%3Ad%3Fe%23f"), ("a+b", "a+b"), ("п", "%D0%BF"), ("%", "%25")):
        assert of(f"postgresql://ann:{encoded}@db/work").parameters["password"] == password
        assert of(f"postgresql://db/work?password={encoded}").parameters["password"] == password


def test_options_of_ours_do_not_reach_libpq_and_its_own_do() -> None:
    address = of(
        "postgresql://db/work?pool_size=3&listen=off&prepared_statements=on&sslmode=require&connect_timeout=7"
        "&options=-c%20statement_timeout%3D5s&application_name=mine"
    )
    assert (address.pool_size, address.listening, address.prepared) == (3, False, True)
    assert address.parameters["sslmode"] == "require"
    assert address.parameters["connect_timeout"] == "7"
    assert address.parameters["options"] == "-c statement_timeout=5s"
    assert address.parameters["application_name"] == "mine"
    assert not {"schema", "pool_size", "listen", "prepared_statements"} & set(address.parameters)
