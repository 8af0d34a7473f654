"""The blocks as Prefect has them: its own suite, how its server finds them, and what their import costs."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prefect.blocks.core import Block
from prefect.plugins import load_prefect_collections
from prefect.testing.standard_test_suites import blocks as prefects
from pydantic import SecretStr, ValidationError

import agent_checkpoint_prefect
from agent_checkpoint_prefect import FencedLock, LeaseStore

ROOT = Path(__file__).parents[2]
LOGO = ROOT / "docs/logo.png"


class OfBothBlocks:
    """What the suites below are run with."""

    @pytest.fixture(params=[LeaseStore, FencedLock], ids=lambda block: block.__name__)
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        return request.param

    @pytest.fixture(autouse=True)
    def _logo_of_this_checkout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prefect's suite reads the logo from where it is published: here from the file that is published there."""

        def urlopen(url: str) -> Any:
            assert url == str(FencedLock._logo_url) == str(LeaseStore._logo_url)
            assert url.endswith(f"/{LOGO.relative_to(ROOT)}")
            return urllib.request.urlopen(LOGO.as_uri())

        monkeypatch.setattr(prefects, "urlopen", urlopen)


class TestPrefectsOwnSuite(OfBothBlocks, prefects.BlockStandardTestSuite):
    """Prefect's rules for blocks, by its own tests."""


def test_the_suite_reads_the_logo_instead_of_skipping_it() -> None:
    assert prefects.HAS_PIL


def test_the_documentation_url_names_the_guide() -> None:
    for block in (LeaseStore, FencedLock):
        assert str(block._documentation_url).endswith("/docs/prefect.md")
    assert (ROOT / "docs/prefect.md").exists()


def test_prefect_finds_the_blocks_by_the_entry_point_of_its_collections() -> None:
    (point,) = entry_points(group="prefect.collections", name="agent_checkpoint_prefect")
    assert point.load() is agent_checkpoint_prefect

    found: dict[str, ModuleType | Exception] = load_prefect_collections()
    assert found["agent_checkpoint_prefect"] is agent_checkpoint_prefect


def test_the_slugs_are_fixed_since_saved_blocks_are_found_by_them() -> None:
    assert (LeaseStore.get_block_type_slug(), LeaseStore.get_block_type_name()) == ("lease-store", "Lease Store")
    assert (FencedLock.get_block_type_slug(), FencedLock.get_block_type_name()) == ("fenced-lock", "Fenced Lock")


@pytest.mark.parametrize("block", [LeaseStore, FencedLock])
def test_a_field_that_a_block_does_not_have_is_refused(block: type[Block]) -> None:
    with pytest.raises(ValidationError, match=r"ttl_second\n.*Extra inputs are not permitted"):
        block.model_validate({"ttl_second": 30})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_seconds", 0),
        ("ttl_seconds", 31 * 86_400),
        ("ttl_seconds", float("nan")),
        ("limit", 0),
        ("timeout_seconds", -1),
        ("timeout_seconds", float("nan")),
        ("on_lost", "ignore"),
        ("namespace", ""),
        ("namespace", "a/b"),
        ("namespace", "a\nb"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        FencedLock.model_validate({field: value})


def test_a_store_is_in_one_place() -> None:
    with pytest.raises(ValidationError, match="path and dsn"):
        LeaseStore(path=Path("agents.db"), dsn=SecretStr("postgresql://127.0.0.1/agents"))


@pytest.mark.parametrize("block", [LeaseStore, FencedLock])
def test_the_fields_of_a_block_that_holds_others_are_in_its_schema(block: type[Block]) -> None:
    schema = block.model_json_schema()

    assert schema["block_type_slug"] == block.get_block_type_slug()
    assert schema["secret_fields"] == (["dsn"] if block is LeaseStore else ["store.dsn"])


def in_another_process(code: str, folder: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_import_adds_little_to_what_prefect_needs_and_starts_nothing(tmp_path: Path) -> None:
    code = """
import sys, threading
import prefect.blocks.core
from prefect.settings import get_current_settings
before, settings = set(sys.modules), get_current_settings().model_dump()
import agent_checkpoint_prefect
agent_checkpoint_prefect.FencedLock()
new = set(sys.modules) - before
print(sorted({name.partition(".")[0] for name in new} - sys.stdlib_module_names - {"prefect"}))
print(sorted(name for name in new if name.startswith(("prefect.server", "prefect.events", "prefect.artifacts"))))
print(threading.active_count(), get_current_settings().model_dump() == settings)
"""
    printed = in_another_process(code, tmp_path).splitlines()
    assert printed == ["['agent_checkpoint', 'agent_checkpoint_prefect']", "[]", "1 True"]
    assert list(tmp_path.iterdir()) == []


def test_outside_of_a_run_and_without_an_api_a_lease_tells_nobody_and_starts_no_server(tmp_path: Path) -> None:
    code = """
import sys, threading
from agent_checkpoint_prefect import FencedLock, LeaseStore
with FencedLock(store=LeaseStore(path="agents.db")).lease("orders"):
    names = {thread.name for thread in threading.enumerate()}
print([name for name in names if "event" in name.lower()], "prefect.server.api.server" in sys.modules)
"""
    assert in_another_process(code, tmp_path) == "[] False\n"


def test_an_api_that_is_down_keeps_nobody_from_a_lease_and_is_not_complained_of(tmp_path: Path) -> None:
    code = """
import threading, time
from agent_checkpoint_prefect import FencedLock, LeaseStore, telling
with FencedLock(store=LeaseStore(path="agents.db")).lease("orders") as lease:
    print(lease.token)
for _ in range(6_000):
    if telling._answered[0] > 0:
        break
    time.sleep(0.01)
print(telling._answered[1], [each.name for each in threading.enumerate() if each.name.startswith("Events")])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # Prefect's thread for events, which waits for the API when the process ends, was not even started.
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\nFalse []\n", "")
