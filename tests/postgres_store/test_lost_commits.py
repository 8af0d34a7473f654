"""A commit whose answer was lost: the right answer, another try, or an error that says so; never a wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests import postgres
from tests.postgres_store.proxy import Connection, Proxy

from agent_checkpoint import OutcomeUnknownError, StateStore, StorageUnreachableError


@pytest.fixture
def proxy(server: postgres.Server) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


def through(proxy: Proxy, schema: str, *options: str) -> str:
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?" + "&".join((f"schema={schema}", *options))


@pytest.fixture
def far(proxy: Proxy, store: StateStore, schema: str) -> Iterator[StateStore]:
    """The store through the wire, by its only connection."""
    with StateStore(through(proxy, schema, "pool_size=1")) as opened:
        assert opened.list_leases() == []
        yield opened


def cut_before(connection: Connection) -> None:
    """The server never hears of the commit."""
    connection.cut()


def cut_after(connection: Connection) -> None:
    """The server hears of it, and nobody hears of the server."""
    connection.forwards_answers = False
    connection.commit()
    connection.cut()


def cut_answered(connection: Connection) -> None:
    """The server has answered, and the answer was lost."""
    connection.forwards_answers = False
    connection.commit()
    assert connection.answered.wait(10)
    connection.cut()


CUTS = (cut_before, cut_after, cut_answered)


@pytest.mark.parametrize("cut", CUTS)
def test_a_grant_whose_answer_was_lost_is_told_rightly(store: StateStore, far: StateStore, proxy: Proxy, cut) -> None:  # type: ignore[no-untyped-def]
    proxy.on_commit = cut

    lease = far.acquire("release", "worker-a")

    assert proxy.on_commit is None
    found = store.get_lease("release")
    assert found is not None
    assert (found.fence, found.acquired_at) == (lease.fence, lease.acquired_at)
    assert [event.token for event in store.events(scope="release")] == [lease.token] == [1]


@pytest.mark.parametrize("cut", CUTS)
def test_a_checkpoint_whose_answer_was_lost_is_saved_once(
    store: StateStore, far: StateStore, proxy: Proxy, cut
) -> None:  # type: ignore[no-untyped-def]
    proxy.on_commit = cut

    saved = far.put_checkpoint("deploy", {"stage": "build"})

    assert proxy.on_commit is None
    assert store.get_checkpoint("deploy") == saved
    assert saved.sequence == 1
    assert far.put_checkpoint("deploy", {"stage": "ship"}).sequence == 2


@pytest.mark.parametrize("cut", CUTS)
def test_a_write_without_an_event_is_told_rightly(store: StateStore, far: StateStore, proxy: Proxy, cut) -> None:  # type: ignore[no-untyped-def]
    with store.transaction(component="tests", action="test.prepare") as part:
        part.run("CREATE TABLE notes (note TEXT)")

    def write() -> None:
        with far.transaction(component="tests", action="test.write") as part:
            part.run("INSERT INTO notes VALUES ('once')")

    proxy.on_commit = cut
    if cut is cut_answered:
        write()
    else:  # the caller's own block is not run again for it
        try:
            write()
        except StorageUnreachableError as error:
            assert error.undone  # noqa: PT017 -- one of two right answers
            write()

    with store.read() as reader:
        assert reader.rows("SELECT note FROM notes") == [("once",)]


@pytest.mark.parametrize("cut", CUTS)
def test_a_commit_of_which_nobody_can_be_asked_has_an_unknown_outcome(
    server: postgres.Server, store: StateStore, proxy: Proxy, schema: str, cut
) -> None:  # type: ignore[no-untyped-def]
    def cut_for_good(connection: Connection) -> None:
        proxy.down = True
        cut(connection)

    with StateStore(through(proxy, schema), busy_timeout_seconds=0.5) as far:
        assert far.list_leases() == []
        proxy.on_commit = cut_for_good

        with pytest.raises(OutcomeUnknownError) as caught:
            far.acquire("release", "worker-a")

        assert (caught.value.exit_status, caught.value.retryable) == (74, False)
        assert re.search("may have happened", str(caught.value))
        # How to find out: by reading.
        proxy.down = False
        found = far.get_lease("release")
        assert (found is None) is (cut is cut_before)


@pytest.fixture
def crashing(own: postgres.Server) -> Iterator[StateStore]:
    """A store whose next commit meets a crash: the server loses the transaction, and gives its number to another."""

    def crash(connection: Connection) -> None:
        connection.tells_the_end = False
        own.kill()
        own.start()
        for _ in range(20):
            own.sql("SELECT pg_current_xact_id()")
            own.sql("CREATE TABLE IF NOT EXISTS burned (); DROP TABLE burned")
        connection.cut()

    proxy = Proxy(own.port)
    url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
    with StateStore(own.url()) as near:
        near.initialize()
    with StateStore(url, busy_timeout_seconds=30) as far:
        assert far.list_leases() == []
        proxy.on_commit = crash
        yield far
    proxy.close()


def test_a_number_that_a_crash_made_free_proves_nothing(own: postgres.Server, crashing: StateStore) -> None:
    lease = crashing.acquire("release", "worker-a", ttl_seconds=3600)

    with StateStore(own.url(), busy_timeout_seconds=30) as near:
        found = near.get_lease("release")
        assert found is not None
        assert (found.fence, found.acquired_at) == (lease.fence, lease.acquired_at)
        assert [event.token for event in near.events(scope="release")] == [lease.token]


def test_what_left_no_event_is_not_known_to_have_survived_a_crash(crashing: StateStore) -> None:
    body = crashing.transaction(component="tests", action="test.write")
    with pytest.raises(OutcomeUnknownError), body as part:
        part.run("UPDATE components SET package = 'another' WHERE component = 'core'")
