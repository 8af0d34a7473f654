"""What a transaction is, is ours to say: the defaults of server, database and role do not count."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests import postgres
from tests.watching import wait_until

from agent_checkpoint import StaleLeaseError, StateStore
from agent_checkpoint_postgres import statements

SETTINGS = {
    "default_transaction_isolation": "repeatable read",
    "default_transaction_read_only": "on",
    "synchronous_commit": "off",
    "lock_timeout": "1ms",
    "search_path": "nowhere",
}
LOOK = "SELECT current_setting('transaction_isolation'), current_setting('synchronous_commit')"
WAITING = "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.fixture
def contrary(server: postgres.Server, schema: str) -> Iterator[str]:
    """A store in a database whose defaults are all against us."""
    server.sql(f"CREATE DATABASE {schema}")
    for name, value in SETTINGS.items():
        server.sql(f"ALTER DATABASE {schema} SET {name} TO '{value}'")
    yield server.url("agent_checkpoint", database=schema)
    server.sql(f"DROP DATABASE {schema} WITH (FORCE)")


def save_stale(store: StateStore, server: postgres.Server) -> list[BaseException | None]:
    """Save under a lease that ends while the writer waits for the scope's lock; the error, or None."""
    late = store.acquire("release", "worker-a", ttl_seconds=3600)
    answers: list[BaseException | None] = []

    def save() -> None:
        try:
            store.put_checkpoint("deploy", {"stage": "late"}, lease=late)
        except BaseException as error:
            answers.append(error)
        else:
            answers.append(None)

    with store.transaction(component="tests", action="test.write", locks=("scope:release",)) as part:
        writer = threading.Thread(target=save)
        writer.start()
        wait_until(lambda: server.sql(WAITING)[0][0])
        part.run("UPDATE leases SET state = 'released', sum = NULL WHERE scope = ?", ("release",))
    writer.join()
    return answers


def test_a_write_whose_lease_ended_while_it_waited_is_refused(contrary: str, server: postgres.Server) -> None:
    with StateStore(contrary) as store:
        store.initialize()
        (error,) = save_stale(store, server)

        assert isinstance(error, StaleLeaseError)
        assert store.get_checkpoint("deploy") is None


def test_under_the_database_s_own_isolation_it_would_land(
    contrary: str, server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = statements.WRITE.replace("ISOLATION LEVEL READ COMMITTED ", "")
    assert broken != statements.WRITE
    monkeypatch.setattr(statements, "WRITE", broken)
    with StateStore(contrary) as store:
        store.initialize()

        assert save_stale(store, server) == [None]


@pytest.mark.parametrize(("synchronous", "level"), [("full", "on"), ("normal", "off")])
def test_a_commit_is_as_durable_as_the_store_was_told(contrary: str, synchronous: str, level: str) -> None:
    with StateStore(contrary, synchronous=synchronous) as store:  # type: ignore[arg-type]
        store.initialize()
        with store.transaction(component="tests", action="test.write") as part:
            assert part.rows(LOOK) == [("read committed", level)]


def test_what_is_set_for_a_transaction_does_not_outlive_it(store: StateStore) -> None:
    with store.transaction(component="tests", action="test.write"):
        pass
    database = store._database
    link = database.borrow(0)  # type: ignore[attr-defined]
    try:
        shown = "SELECT current_setting('search_path'), current_setting('idle_in_transaction_session_timeout')"
        assert link.ask(shown.encode()) == ('"$user", public', "0")
    finally:
        database.links.give_back(link)  # type: ignore[attr-defined]
