"""A server that cannot be used is one error of ours, and the password is in nothing that anybody sees."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator

import pytest
from tests import postgres

from agent_checkpoint import StateStore
from agent_checkpoint.errors import AgentCheckpointError, StorageError, StorageUnreachableError

PASSWORD = f"correct-horse-{os.getpid()}"
WRONG = f"wrong-horse-{os.getpid()}"


@pytest.fixture(scope="module")
def guarded() -> Iterator[postgres.Server]:
    """A server that asks ann for her password."""
    server = postgres.Server(*postgres.QUICK)
    server.hba("host all ann 127.0.0.1/32 scram-sha-256")
    server.start()
    server.sql(f"CREATE ROLE ann LOGIN PASSWORD '{PASSWORD}'; CREATE SCHEMA ann AUTHORIZATION ann")
    yield server
    server.remove()


def url(
    server: postgres.Server, password: str, *, port: int = 0, host: str = "127.0.0.1", database: str = "postgres"
) -> str:
    return f"postgresql://ann:{password}@{host}:{port or server.port}/{database}?schema=ann"


def everything(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + repr(getattr(error, "facts", ""))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"password": WRONG}, "authentication failed"),
        ({"password": PASSWORD, "database": "nowhere"}, "does not exist"),
        ({"password": PASSWORD, "port": 1}, "refused"),
        ({"password": PASSWORD, "host": "nowhere.invalid"}, "nowhere.invalid"),
    ],
)
def test_what_cannot_be_reached_says_why_and_keeps_the_password(
    guarded: postgres.Server, caplog: pytest.LogCaptureFixture, wrong: dict, says: str
) -> None:  # type: ignore[type-arg]
    caplog.set_level(logging.DEBUG)
    with StateStore(url(guarded, **wrong), busy_timeout_seconds=1) as store:
        checks = store.doctor()
        seen = [repr(store), repr(checks)]
        for use in (store.initialize, store.list_leases, lambda: store.acquire("release", "worker-a", wait_seconds=1)):
            with pytest.raises(StorageUnreachableError, match=says) as caught:
                use()
            assert caught.value.exit_status == 74
            assert str(caught.value).startswith(store.database)
            seen.append(everything(caught.value))
    assert [check.verdict for check in checks if check.check == "server"] == ["broken"]
    assert wrong["password"] not in "".join([*seen, caplog.text])


def test_a_store_in_use_shows_its_password_to_nobody(
    guarded: postgres.Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with StateStore(url(guarded, PASSWORD)) as store:
        store.initialize()
        with store.hold("release", "worker-a", metadata={"of": "ann"}) as held:
            store.put_checkpoint("deploy", {}, lease=held)
            seen = [repr(each) for each in (store, store.status(), store.doctor(), store.events(), held, held.lease)]
        body = store.transaction(component="tests", action="test.write")
        with pytest.raises(StorageError) as caught, body as part:
            part.run("INSERT INTO nothing VALUES (1)")
        seen.append(everything(caught.value))
        assert store.address == url(guarded, PASSWORD)
    with pytest.raises(AgentCheckpointError) as closed:
        store.list_leases()
    assert PASSWORD not in "".join([*seen, everything(closed.value), caplog.text])


def test_a_password_that_came_by_the_environment_stands_in_no_command_line(guarded: postgres.Server) -> None:
    ran = run(
        *("run", "lines", "--owner", "worker-a", "--", "ps", "-eo", "args", "ww"),
        AGENT_CHECKPOINT_DB=url(guarded, PASSWORD),
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "agent_checkpoint" in ran.stdout
    assert PASSWORD not in ran.stdout


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent_checkpoint", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_the_command_shows_the_password_only_where_a_shell_takes_it_over(guarded: postgres.Server) -> None:
    db = url(guarded, PASSWORD)
    commands: list[tuple[tuple[str, ...], int]] = [
        (("init",), 0),
        (("lease", "acquire", "release", "--owner", "worker-a", "--ttl", "60"), 0),
        (("lease", "acquire", "release", "--owner", "worker-b", "--ttl", "60"), 75),
        (("status",), 0),
        (("doctor",), 0),
        (("checkpoint", "get", "nothing"), 66),
    ]
    for words, status in commands:
        ran = run("--db", db, *words)
        assert ran.returncode == status, ran.stderr
        assert PASSWORD not in ran.stdout + ran.stderr
    for wrong, status in ((url(guarded, WRONG), 74), (f"postgresql://ann:{WRONG}/{WRONG}@h/d", 2)):
        ran = run("--db", wrong, "lease", "list")
        assert ran.returncode == status
        assert ran.stdout == ""
        assert set(json.loads(ran.stderr)) == {"error"}
        assert WRONG not in ran.stderr
