"""Many processes at once: one winner, no token and no sequence twice."""

from __future__ import annotations

from tests.postgres_store.crew import crew, work

from agent_checkpoint import StateStore

PROCESSES = 8
RACES = 40

RACER = """
import json, sys
from agent_checkpoint import LeaseHeldError, StateStore
url, owner = sys.argv[1:]
with StateStore(url) as store:
    store.get_lease("race")
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        try:
            print(store.acquire("race", owner, ttl_seconds=3600).token, flush=True)
        except LeaseHeldError:
            print("null", flush=True)
"""

WRITER = """
import json, sys
from agent_checkpoint import StateStore
url, owner, scope, rounds = sys.argv[1:]
with StateStore(url) as store:
    lease = store.acquire(scope, owner, ttl_seconds=3600, limit=8)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    for number in range(int(rounds)):
        saved = store.put_checkpoint("shared", {"by": owner, "number": number}, lease=lease, rebind=True)
        print(json.dumps([saved.sequence, owner, number]))
"""


def test_each_race_for_a_scope_has_one_winner_with_a_higher_token(store: StateStore, url: str) -> None:
    tokens = []
    with crew(RACER, [(url, f"worker-{number}") for number in range(PROCESSES)]) as racers:
        assert [racer.answer() for racer in racers] == ["ready"] * PROCESSES
        for _ in range(RACES):
            for racer in racers:
                racer.go()
            won = [token for token in [racer.answer() for racer in racers] if token is not None]
            assert len(won) == 1
            tokens += won
            store.force_release("race", reason="the next race", token=won[0])

    assert tokens == list(range(1, RACES + 1))
    events = store.events(after="start", limit=1_000, scope="race")
    assert [event.token for event in events if event.kind == "lease.acquired"] == tokens


def test_two_scopes_that_write_one_workflow_collide_in_no_sequence(store: StateStore, url: str) -> None:
    rounds = 20
    said = work(WRITER, [(url, f"worker-{number}", f"scope-{number % 2}", rounds) for number in range(PROCESSES)])

    saved = sorted(line for lines in said for line in lines)
    assert [sequence for sequence, _, _ in saved] == list(range(1, PROCESSES * rounds + 1))
    for sequence, owner, number in saved:
        found = store.get_checkpoint("shared", sequence=sequence)
        assert found is not None
        assert found.data == {"by": owner, "number": number}
