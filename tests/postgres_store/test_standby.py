"""A standby can be read; when it takes over, whoever may go there goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator

import pytest
from tests import postgres
from tests.postgres_store.proxy import Connection, Proxy

from agent_checkpoint import OutcomeUnknownError, StateStore, StorageReadOnlyError

CAUGHT_UP = "SELECT pg_last_wal_replay_lsn() >= '{lsn}'::pg_lsn"


@pytest.fixture
def standby(own: postgres.Server) -> Iterator[postgres.Server]:
    """A copy of ``own`` that follows it, asynchronously."""
    with StateStore(own.url()) as store:
        store.initialize()
    server = postgres.Server()
    shutil.rmtree(server.data)
    source = ("-h", "127.0.0.1", "-p", str(own.port), "-U", "postgres")
    server.run("pg_basebackup", *source, "-D", server.data, "-R", "-X", "stream", "-c", "fast")
    yield server.start()
    server.remove()


def follow(primary: postgres.Server, standby: postgres.Server) -> None:
    """Until all that the primary has written is there."""
    (lsn,) = primary.sql("SELECT pg_current_wal_lsn()")[0]
    for _ in range(1_000):
        if standby.sql(CAUGHT_UP.format(lsn=lsn)) == [(True,)]:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the standby does not follow")


def either(first: int, second: int) -> str:
    return f"postgresql://postgres@127.0.0.1:{first},127.0.0.1:{second}/postgres?target_session_attrs=read-write"


def test_a_standby_can_be_read_and_says_what_it_is(own: postgres.Server, standby: postgres.Server) -> None:
    with StateStore(own.url()) as store, StateStore(standby.url()) as copy:
        lease = store.acquire("release", "worker-a", ttl_seconds=3600)
        follow(own, standby)
        assert copy.check_lease(*lease.fence).token == 1
        assert copy.events(after="start") == store.events(after="start")
        with pytest.raises(StorageReadOnlyError) as caught:
            copy.put_checkpoint("deploy", {})
        assert "primary" in caught.value.hint
        verdicts = {check.check: check.verdict for check in copy.doctor()}
        assert (verdicts["server"], "broken" in verdicts.values()) == ("warning", False)
        verdicts = {check.check: check.verdict for check in store.doctor()}
        assert (verdicts["server"], verdicts["standbys"]) == ("ok", "warning")


def test_clients_go_on_with_the_standby_that_took_over(own: postgres.Server, standby: postgres.Server) -> None:
    with StateStore(either(own.port, standby.port), busy_timeout_seconds=60) as store:
        lease = store.acquire("release", "worker-a", ttl_seconds=3600)
        store.put_checkpoint("deploy", {"number": 1}, lease=lease)
        before = store.events(after="start")
        follow(own, standby)
        own.kill()
        promoting = threading.Thread(target=standby.sql, args=("SELECT pg_promote()",))
        promoting.start()

        assert store.put_checkpoint("deploy", {"number": 2}, lease=lease).sequence == 2

        promoting.join()
        after = store.events(after="start")
        assert after[:-1] == before
        assert [event.kind for event in store.events(after=before[-1].cursor)] == ["checkpoint.saved"]
        assert store.heartbeat(*lease.fence).token == 1


def test_nobody_can_tell_of_a_commit_that_the_standby_has_not_heard_of(
    own: postgres.Server, standby: postgres.Server
) -> None:
    proxy = Proxy(own.port)

    def take_over(connection: Connection) -> None:
        connection.tells_the_end = False
        proxy.down = True
        own.kill()
        standby.sql("SELECT pg_promote()")
        connection.cut()

    with StateStore(either(proxy.port, standby.port), busy_timeout_seconds=60) as store:
        assert store.list_leases() == []
        proxy.on_commit = take_over
        with pytest.raises(OutcomeUnknownError, match="may have happened"):
            store.acquire("release", "worker-a")
        assert store.get_lease("release") is None
        assert store.acquire("release", "worker-b").token == 1
    proxy.close()
