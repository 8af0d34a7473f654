"""Those who want a scope: at once, or in its queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.faults.model.base import OWNERS, SCOPES, Model, Person, Worker
from tests.faults.model.shadow import Ask, Place, Verdict, check
from tests.faults.model.world import Identity

from agent_checkpoint import InvalidInputError, LeaseHeldError, WaitTimeoutError
from agent_checkpoint.names import NS

TTLS = (NS // 10, NS, 1_500_000_001, 20 * NS, 600 * NS)
WAITS = (math.inf, math.inf, math.inf, 0.05, 2.0)
MOST_WAITING = 6


def acquire(model: Model, dice: Random) -> None:
    """Somebody asks, and does not wait."""
    worker = model.worker(dice)
    scope = model.leases.scope(dice.choice(SCOPES))
    fixed = scope.slots or scope.limit
    limit = dice.choice((1, 2, 3)) if not fixed or dice.randrange(12) == 0 else dice.choice((None, scope.most))
    reclaim = dice.randrange(5) == 0 and (scope.most == 1 or dice.randrange(5) == 0)
    bound = _bound(model, worker, dice)
    ask = Ask(scope.name, dice.choice(OWNERS), dice.choice(TTLS), limit, reclaim, bound)
    ask_as(model, worker, ask)


def _bound(model: Model, worker: Worker, dice: Random) -> Identity | None:
    """What a lease is bound to: the worker's process, or nothing; always nothing where that would prove nothing."""
    return model.world.written_down(worker.process) if dice.randrange(2) and not model.world.by_server else None


def ask_as(model: Model, worker: Worker, ask: Ask) -> None:
    """Ask for a scope, once."""
    places = model.places(ask.scope)
    verdict = model.leases.judge(ask, places)
    pid = ask.process and ask.process.process.pid
    options = {"limit": ask.limit, "reclaim": ask.reclaim, "pid": pid, "metadata": {"for": ask.owner}}
    with model.world.acting_as(worker.process):
        try:
            found = worker.store.acquire(ask.scope, ask.owner, ask.ttl / NS, **options)
        except (LeaseHeldError, InvalidInputError) as error:
            found = error
    judged(model, ask, verdict, found, places)
    model.did(f"acquire {verdict.outcome}")
    model.settle([ask.scope], verdict.events)


def judged(model: Model, ask: Ask, verdict: Verdict, found: Any, places: Sequence[Place]) -> None:
    """What became of an ask is what must become of it, and goes into the shadow."""
    outcome = _outcome(found)
    granted = verdict.outcome in ("granted", "reclaimed")
    must = "granted" if granted else verdict.outcome
    check(outcome == must, f"{ask.owner} asked for {ask.scope}: {outcome} ({found}), must be {verdict.outcome}")
    if not granted:
        model.leases.refuse(verdict)
        return
    grant = model.leases.grant(ask, verdict)
    got = (found.scope, found.owner, found.token, found.slot, found.row.ttl_ns, found.state)
    must_get = (*grant.fence, verdict.slot, ask.ttl, "live")
    check(got == must_get, f"granted {got}, must be {must_get}")
    model.remember(grant)
    passed = {each.number for each in places if each.passed} | set(verdict.passed)
    now_passed = {each.number for each in model.places(ask.scope) if each.passed} if places else set()
    check(now_passed <= passed, f"{now_passed - passed} were passed over, though their turn has not come")
    check(set(verdict.passed) <= now_passed, f"{verdict.passed} were passed over, and are waited for still")


def _outcome(found: Any) -> str:
    if isinstance(found, LeaseHeldError):
        return "behind" if found.owner is None else "held"
    return "invalid" if isinstance(found, InvalidInputError) else "granted"


def queue_up(model: Model, dice: Random) -> None:
    """Somebody comes to wait."""
    if len(model.persons) >= MOST_WAITING:
        return
    worker = Worker(dice.choice(model.workers).store, model.world.start())
    bound = _bound(model, worker, dice)
    ask = Ask(dice.choice(SCOPES), dice.choice(OWNERS), dice.choice(TTLS), process=bound)
    with model.world.acting_as(worker.process):
        person = Person(worker, ask, model.ground.waiter(worker.store, ask, dice.choice(WAITS), worker))
    model.persons.append(person)
    look(model, person, rang=False, first=True)


def look_around(model: Model, dice: Random) -> None:
    """Somebody who waits looks whether it is its turn; now and then a bell rang."""
    person = model.somebody(dice)
    if person is not None:
        look(model, person, rang=dice.randrange(2) == 0)


def look(model: Model, person: Person, *, rang: bool, first: bool = False) -> None:
    """One step of a waiter. A look that must find its turn takes it; others may pause on."""
    number = person.waiter._ask.ticket
    ask = person.ask._replace(number=number)
    places = model.places(ask.scope)
    verdict = model.leases.judge(ask, places)
    with model.world.acting_as(person.worker.process):
        try:
            found = person.waiter.step(rang)
        except WaitTimeoutError as error:
            found = error
            person.waiter.leave()
    if isinstance(found, float):
        check(found >= 0, f"{ask.owner} is to pause for {found} s")
        _goes_on(model, person, ask, verdict, sure=first or rang)
        if not rang:  # who asks at once looks after its place the next time
            _has_its_place(model, person)
        return
    model.persons.remove(person)
    if isinstance(found, WaitTimeoutError):
        check(verdict.outcome in ("held", "behind"), f"{ask.owner}'s wait is over, must be {verdict.outcome}")
        if model.settle_perhaps(verdict.events):
            model.leases.refuse(verdict)
        model.did("wait over")
        return
    judged(model, ask, verdict, found, places)
    model.did("wait granted")
    model.settle([ask.scope], verdict.events)


def _goes_on(model: Model, person: Person, ask: Ask, verdict: Verdict, sure: bool) -> None:
    if verdict.outcome == "granted":
        check(not sure, f"{ask.owner} waits for {ask.scope} though it is free and nobody in front is awake")
    elif model.settle_perhaps(verdict.events):
        model.leases.refuse(verdict)
    number = person.waiter._ask.ticket
    if number != ask.number:
        check(number > model.highest_ticket, f"ticket {number} came again, the last one was {model.highest_ticket}")
        model.highest_ticket = number
        model.tickets[number] = model.world.written_down(person.worker.process)
    model.did("wait goes on")
    model.compare(ask.scope)


def _has_its_place(model: Model, person: Person) -> None:
    now, number = model.world.now, person.waiter._ask.ticket
    if now.domain:  # where the wall clock decides, a step of it is noticed later
        own = [each for each in model.places(person.ask.scope) if each.number == number]
        there = any(each.left(now)[0] and not each.passed for each in own)
        check(there, f"{person.ask.owner} has looked, and has no place in the queue of {person.ask.scope}")


def leave(model: Model, dice: Random) -> None:
    """Somebody who waits is cancelled."""
    person = model.somebody(dice)
    if person is None:
        return
    number = person.waiter._ask.ticket
    with model.world.acting_as(person.worker.process):
        person.waiter.leave()
    model.persons.remove(person)
    gone = all(each.number != number for each in model.places(person.ask.scope))
    check(gone, f"{person.ask.owner} has left, and its ticket {number} is there")
    model.did("wait left")
    model.settle([person.ask.scope], ())


def freeze(model: Model, dice: Random) -> None:
    """Somebody who waits is frozen, or wakes up."""
    if model.persons:
        person = dice.choice(model.persons)
        person.frozen = not person.frozen
        model.world.faults["freeze"] += person.frozen


def waiter_dies(model: Model, dice: Random) -> None:
    """The process of somebody who waits is killed; its pid may be another's at once."""
    if model.persons:
        person = dice.choice(model.persons)
        model.persons.remove(person)
        model.world.kill(person.worker.process, recycled=dice.randrange(3) == 0)
