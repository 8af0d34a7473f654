"""The first use of a schema: many at once, few rights, odd names, and what is somebody else's."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from tests import postgres
from tests.postgres_store.crew import work

from agent_checkpoint import AgentCheckpointError, NotAStoreError, NotFoundError, StateStore
from agent_checkpoint.errors import NewerSchemaError, StorageError, StorageReadOnlyError

STARTERS = 20

STARTER = """
import json, sys
from agent_checkpoint import StateStore
url, owner = sys.argv[1:]
with StateStore(url) as store:
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    created = store.initialize()
    print(json.dumps([created, store.acquire(owner, owner).token]))
"""


def test_twenty_that_start_at_once_make_one_store(url: str) -> None:
    said = work(STARTER, [(url, f"starter-{number}") for number in range(STARTERS)])

    assert sorted(line for lines in said for line in lines) == [[False, 1]] * (STARTERS - 1) + [[True, 1]]
    with StateStore(url) as store:
        kinds = [event.kind for event in store.events(after="start")]
    assert kinds == ["store.initialized"] + ["lease.acquired"] * STARTERS


def test_nothing_is_made_before_it_is_asked_for(url: str, schema: str, server: postgres.Server) -> None:
    with StateStore(url) as store:
        for use in (store.list_leases, lambda: store.acquire("release", "worker-a"), store.status, store.doctor):
            with pytest.raises(NotFoundError) as caught:
                use()
            assert schema in str(caught.value)
    assert server.sql(f"SELECT COUNT(*) FROM pg_namespace WHERE nspname = '{schema}'") == [(0,)]


@pytest.mark.parametrize(
    "name", ['two "words"', "o'clock", "Склад", "UPPER", "a.b", "select", "100%", "$1", "q?", "s;--"]
)
def test_a_schema_may_have_any_name(server: postgres.Server, name: str) -> None:
    with StateStore(server.url(quote(name))) as store:
        assert store.initialize() is True
        assert store.initialize() is False
        lease = store.acquire("release", "worker-a")
        store.put_checkpoint("deploy", {"stage": "build"}, lease=lease)
        assert store.check_lease(*lease.fence).token == 1
        assert [event.kind for event in store.events()][-1] == "checkpoint.saved"
        assert [check for check in store.doctor() if check.verdict == "broken"] == []
    assert server.sql("SELECT 1 FROM pg_namespace WHERE nspname = $n$" + name + "$n$") == [(1,)]
    server.sql('DROP SCHEMA "' + name.replace('"', '""') + '" CASCADE')


@pytest.mark.parametrize("table", ["events", "leases", "components"])
def test_a_schema_with_tables_of_another_program_is_left_as_it_is(
    url: str, schema: str, server: postgres.Server, table: str
) -> None:
    server.sql(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.{table} (mine TEXT)")
    with StateStore(url) as store:
        for use in (store.initialize, store.list_leases):
            with pytest.raises((NotAStoreError, NotFoundError)) as caught:
                use()
        with pytest.raises(NotAStoreError) as caught:
            store.initialize()
    assert caught.value.exit_status == 74
    assert server.sql(f"SELECT relname FROM pg_class WHERE relnamespace = '{schema}'::regnamespace") == [(table,)]


@pytest.fixture
def role(server: postgres.Server, schema: str) -> Iterator[str]:
    """A role that may do nothing yet."""
    name = f"role_{schema}"
    server.sql(f"CREATE ROLE {name} LOGIN")
    yield name
    server.sql(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def as_role(server: postgres.Server, role: str, schema: str) -> str:
    return server.url(schema).replace("postgres@", f"{role}@")


def test_a_role_that_may_not_create_schemas_uses_one_of_its_own(
    server: postgres.Server, role: str, schema: str
) -> None:
    with StateStore(as_role(server, role, schema)) as store:
        with pytest.raises(StorageReadOnlyError) as caught:
            store.initialize()
        assert "Roles and grants" in caught.value.hint

        server.sql(f"CREATE SCHEMA {schema} AUTHORIZATION {role}")
        assert store.initialize() is True
        assert store.acquire("release", "worker-a").token == 1
        assert [check for check in store.doctor() if check.verdict == "broken"] == []
    server.sql(f"DROP SCHEMA {schema} CASCADE")


def test_a_role_with_the_least_rights_may_use_a_store_or_only_read_it(
    store: StateStore, server: postgres.Server, role: str, schema: str
) -> None:
    with StateStore(as_role(server, role, schema)) as other:
        with pytest.raises(AgentCheckpointError) as caught:
            other.list_leases()
        assert isinstance(caught.value, (StorageError, NotFoundError))

        server.sql(f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}")
        assert other.list_leases() == []
        assert [event.kind for event in other.events()] == ["store.initialized"]
        with pytest.raises(StorageReadOnlyError):
            other.acquire("release", "worker-a")

        server.sql(f"GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}")
        lease = other.acquire("release", "worker-a")
        other.put_checkpoint("deploy", {}, lease=lease)
        other.release(*lease.fence)


def test_a_store_of_a_newer_version_is_left_as_it_is(
    store: StateStore, url: str, schema: str, server: postgres.Server
) -> None:
    server.sql(f"UPDATE {schema}.components SET version = 999 WHERE component = 'core'")
    with StateStore(url) as other:
        for use in (other.initialize, other.list_leases, lambda: other.acquire("release", "worker-a")):
            with pytest.raises(NewerSchemaError):
                use()


def test_a_database_that_cannot_store_every_name_is_refused(server: postgres.Server, schema: str) -> None:
    server.sql(f"CREATE DATABASE {schema} TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
    with StateStore(server.url(database=schema)) as store, pytest.raises(StorageError, match="LATIN1") as caught:
        store.initialize()
    assert "UTF8" in caught.value.hint
    server.sql(f"DROP DATABASE {schema} WITH (FORCE)")


def test_a_store_that_was_dropped_while_it_was_open_is_not_found(
    store: StateStore, schema: str, server: postgres.Server
) -> None:
    store.acquire("release", "worker-a")
    server.sql(f"DROP SCHEMA {schema} CASCADE")
    for use in (store.list_leases, lambda: store.acquire("release", "worker-b"), lambda: store.get_lease("release")):
        with pytest.raises(NotFoundError, match=schema):
            use()
    store.initialize()
    assert store.acquire("release", "worker-b").token == 1
