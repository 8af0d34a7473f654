"""Blocks that were saved to a Prefect API and come back from it."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from pydantic import SecretStr

from agent_checkpoint_prefect import FencedLock, LeaseStore

from .harness import in_async_code

pytestmark = pytest.mark.long  # they start a Prefect API, which takes its time

DSN = "postgresql://agents:s3cret@127.0.0.1/agents"


def test_a_lock_comes_back_as_it_was_saved(api: str, path: Path) -> None:
    saved = FencedLock(
        store=LeaseStore(path=path),
        namespace="billing",
        ttl_seconds=12.5,
        limit=3,
        timeout_seconds=7,
        on_lost="raise",
    )
    saved.save("billing-lock")

    loaded = FencedLock.load("billing-lock")
    assert isinstance(loaded, FencedLock)
    assert loaded == saved
    assert loaded.model_dump() == saved.model_dump()


def test_a_lock_with_all_its_defaults_comes_back(api: str) -> None:
    FencedLock().save("plain-lock")
    assert FencedLock.load("plain-lock") == FencedLock()


def test_a_lock_that_was_loaded_holds_the_names_of_the_one_that_was_saved(api: str, lock: FencedLock) -> None:
    lock.save("same-names")
    loaded = FencedLock.load("same-names")
    assert isinstance(loaded, FencedLock)

    with lock.lease("orders") as lease:
        assert loaded.try_acquire("invoices") is not None
        held = loaded.inspect("orders")
    assert held is not None
    assert held.token == lease.token


def test_a_store_that_was_saved_is_one_document_for_the_locks_that_name_it(
    api: str, path: Path, tmp_path: Path
) -> None:
    LeaseStore(path=path).save("shared-store")
    store = LeaseStore.load("shared-store")
    assert isinstance(store, LeaseStore)
    FencedLock(store=store, namespace="one").save("first-lock")
    FencedLock(store=store, namespace="two").save("second-lock")

    LeaseStore(path=tmp_path / "elsewhere.db").save("shared-store", overwrite=True)

    for name in ("first-lock", "second-lock"):
        loaded = FencedLock.load(name)
        assert isinstance(loaded, FencedLock)
        assert loaded.store.path == tmp_path / "elsewhere.db"


def test_a_block_is_saved_and_loaded_in_async_code_too(api: str, lock: FencedLock) -> None:
    async def there_and_back() -> object:
        await lock.asave("awaited-lock")
        return await FencedLock.aload("awaited-lock")

    assert in_async_code(there_and_back()) == lock


@pytest.mark.parametrize("nested", [False, True])
def test_a_dsn_is_a_secret_to_everybody_but_those_who_load_it(
    client: SyncPrefectClient, nested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = LeaseStore(dsn=SecretStr(DSN))
    block = FencedLock(store=store) if nested else store
    document_id = block.save(f"secret-{nested}".lower())
    assert isinstance(document_id, UUID)

    shown = client.request("GET", f"/block_documents/{document_id}")
    assert "s3cret" not in shown.text
    assert "s3cret" not in repr(block) + str(block) + caplog.text

    loaded = type(block).load(f"secret-{nested}".lower())
    found = loaded.store if isinstance(loaded, FencedLock) else loaded
    assert isinstance(found, LeaseStore)
    assert found.dsn is not None
    assert found.dsn.get_secret_value() == DSN


def test_the_block_types_are_registered_as_they_describe_themselves(client: SyncPrefectClient) -> None:
    for block in (LeaseStore, FencedLock):
        block.register_type_and_schema()
        slug = block.get_block_type_slug()
        found = client.request("GET", f"/block_types/slug/{slug}").json()
        assert found["name"] == block.get_block_type_name()
        assert found["logo_url"] == str(block._logo_url)
        assert found["documentation_url"] == str(block._documentation_url)
        assert found["description"] == block.get_description()
