"""The block as a value: it may be compared, copied, pickled, and sent to another process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from prefect.cache_policies import INPUTS, RUN_ID, TASK_SOURCE, CachePolicy
from prefect.transactions import IsolationLevel
from pydantic import ValidationError

from agent_checkpoint_prefect import (
    FencedLock,
    LeaseLostError,
    LeaseReentrancyError,
    LeaseStore,
    current_fencing_token,
)

from .conftest import Locks, elsewhere
from .losing import lose


def by_pickle(lock: FencedLock) -> FencedLock:
    return pickle.loads(pickle.dumps(lock))


def by_cloudpickle(lock: FencedLock) -> FencedLock:
    return cloudpickle.loads(cloudpickle.dumps(lock))


COPIES = [copy.copy, copy.deepcopy, by_pickle, by_cloudpickle, FencedLock.model_copy]


@pytest.fixture(params=COPIES, ids=lambda copied: copied.__name__)
def copied(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_copy_is_the_same_lock(lock: FencedLock, copied: Any) -> None:
    other = copied(lock)
    assert other == lock
    with lock.lease("orders"), pytest.raises(LeaseReentrancyError):
        other.acquire("orders")
    with other.lease("orders"):
        assert elsewhere(lock.try_acquire, "orders") is None


def test_a_copy_knows_the_records_of_the_other(lock: FencedLock, copied: Any) -> None:
    lock.acquire_lock("key", "one")
    other = copied(lock)
    assert other.acquire_lock("key", "one", acquire_timeout=0)
    assert other.is_lock_holder("key", "one")
    other.release_lock("key", "one")
    assert not lock.is_locked("key")


def test_a_lock_that_is_held_can_be_copied(lock: FencedLock, copied: Any) -> None:
    with lock.lease("orders"):
        assert copied(lock) == lock


def test_a_fenced_function_that_was_pickled_by_value_takes_its_name(lock: FencedLock) -> None:
    @lock.fenced("orders-{number}")
    def publish(number: int) -> tuple[int, int | None]:
        return number, current_fencing_token()

    there: Any = cloudpickle.loads(cloudpickle.dumps(publish))
    assert there(7) == (7, 1)


def test_locks_are_equal_by_value(locks: Locks, tmp_path: Path) -> None:
    assert locks() == locks()
    assert locks() != locks(namespace="other")
    assert locks() != locks(ttl_seconds=5)
    assert locks() != locks(limit=2)
    assert locks() != FencedLock(store=LeaseStore(path=tmp_path / "other.db"))


def test_cache_policies_with_equal_locks_can_be_added(locks: Locks) -> None:
    def configured(policy: CachePolicy, lock: FencedLock) -> CachePolicy:
        return policy.configure(lock_manager=lock, isolation_level=IsolationLevel.SERIALIZABLE)

    both = configured(INPUTS, locks()) + configured(TASK_SOURCE, locks())
    assert both.lock_manager == locks()
    assert (both + RUN_ID).lock_manager == locks()
    with pytest.raises(ValueError, match="lock"):
        configured(INPUTS, locks()) + configured(TASK_SOURCE, locks(namespace="other"))


def test_a_configured_policy_can_be_configured_again(lock: FencedLock) -> None:
    policy = INPUTS.configure(lock_manager=lock).configure(isolation_level=IsolationLevel.SERIALIZABLE)
    assert policy.lock_manager == lock
    assert policy.lock_manager is not lock or policy.lock_manager == lock


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_seconds": 0.05},
        {"ttl_seconds": 31 * 86_400},
        {"ttl_seconds": float("nan")},
        {"limit": 0},
        {"timeout_seconds": -1},
        {"timeout_seconds": float("nan")},
        {"on_lost": "ignore"},
        {"namespace": "a/b"},
        {"colour": "red"},
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FencedLock(**wrong)


def test_a_store_has_one_place(path: Path) -> None:
    with pytest.raises(ValidationError):
        LeaseStore(path=path, dsn="postgresql://db/leases")
    with pytest.raises(ValidationError):
        LeaseStore(path=path, colour="red")


def test_a_dsn_is_a_secret() -> None:
    store = LeaseStore(dsn="postgresql://me:s3cret@db/leases")
    assert "s3cret" not in repr(store)
    assert "s3cret" not in str(FencedLock(store=store))
    assert pickle.loads(pickle.dumps(store)) == store


def test_two_ways_to_write_a_path_are_one_store(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    one = LeaseStore(path=tmp_path / "agents.db").open()
    assert LeaseStore(path=tmp_path / "link" / "agents.db").open() is one
    one.close()


def test_errors_survive_a_pickle(lock: FencedLock) -> None:
    lease = lock.acquire("orders")
    with pytest.raises(LeaseReentrancyError) as reentrant:
        lock.acquire("orders")
    lose(lock, lease)
    with pytest.raises(LeaseLostError) as lost:
        lease.check()
    for error in (reentrant.value, lost.value, LeaseLostError()):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (str(again), again.facts) == (str(error), error.facts)
