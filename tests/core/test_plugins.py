"""Who else is asked and told: plugins given by the program (installed ones: tests/end_to_end)."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from agent_checkpoint import (
    Event,
    FencedWrite,
    FenceRefusedError,
    ReentrancyError,
    StateStore,
    Write,
    hookimpl,
    plugins,
)


class Listener:
    def __init__(self) -> None:
        self.heard: list[Event] = []

    @hookimpl
    def event_recorded(self, event: Event) -> None:
        self.heard.append(event)


class Veto:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked: list[Write] = []

    @hookimpl
    def check_fence(self, write: Write) -> None:
        self.asked.append(write)
        if self.error is not None:
            raise self.error


def opened(path: Path, *plugins: object) -> StateStore:
    store = StateStore(path, plugins=plugins)
    store.initialize()
    return store


def test_each_event_is_heard_once_after_its_commit(path: Path) -> None:
    listener = Listener()
    store = opened(path, listener)
    lease = store.acquire("release", "worker-a", 30)
    store.put_checkpoint("deploy", 1, lease=lease)
    store.release(*lease.fence)
    with pytest.raises(RuntimeError):
        store.release(*lease.fence)

    assert listener.heard == store.events()
    assert [event.kind for event in listener.heard][-1] == "write.refused"


def test_a_veto_refuses_the_write_by_name_and_is_on_record(path: Path) -> None:
    veto = Veto(FenceRefusedError("not today"))
    store = opened(path, veto)
    lease = store.acquire("release", "worker-a", 30)
    with pytest.raises(FenceRefusedError) as refused:
        store.put_checkpoint("deploy", 1, lease=lease, expected_sequence=0)

    assert (refused.value.reason, refused.value.exit_status) == ("not today", 77)
    assert store.get_checkpoint("deploy") is None
    (event,) = store.events(kind="write.refused")
    assert event.detail["plugin"] == refused.value.plugin
    assert (event.scope, event.token, event.workflow) == ("release", 1, "deploy")
    (write,) = veto.asked
    assert write == Write("core", "checkpoint.put", "release", "worker-a", 1, "deploy", 0, {"rebind": False})


def test_any_other_exception_of_a_veto_refuses_too(path: Path) -> None:
    store = opened(path, Veto(ZeroDivisionError("oops")))
    with pytest.raises(FenceRefusedError, match="ZeroDivisionError: oops"):
        store.put_checkpoint("deploy", 1, lease=store.acquire("release", "worker-a", 30))


def test_unprotected_writes_are_not_asked_about_but_a_rebind_is(path: Path) -> None:
    veto = Veto(None)
    store = opened(path, veto)
    store.put_checkpoint("plain", 1)
    assert veto.asked == []
    store.put_checkpoint("plain", 1, rebind=True)
    assert [write.detail for write in veto.asked] == [{"rebind": True}]


def test_adapters_writes_are_asked_about_before_any_lock(path: Path) -> None:
    veto = Veto(None)
    store = opened(path, veto)
    lease = store.acquire("release", "worker-a", 30)
    with store.transaction(component="notes", action="note.write", fence=lease, detail={"n": 1}):
        pass
    store.write_all([FencedWrite("notes", "note.write", None, lease), FencedWrite("notes", "note.write")])
    assert [(write.component, write.action, write.detail) for write in veto.asked] == [
        ("notes", "note.write", {"n": 1}),
        ("notes", "note.write", {}),
    ]


def test_a_listener_that_fails_is_logged_and_the_others_still_hear(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        @hookimpl
        def event_recorded(self, event: Event) -> None:
            raise RuntimeError("no")

    listener = Listener()
    with caplog.at_level(logging.ERROR, logger="agent_checkpoint.plugins"):
        store = opened(path, Broken(), listener, Broken())
    assert listener.heard == store.events()
    assert len(caplog.records) == 2


@pytest.mark.parametrize("call", ["acquire", "get_lease", "events", "status", "initialize", "list_leases", "doctor"])
def test_a_hook_that_calls_the_store_is_refused(path: Path, call: str) -> None:
    calls = {"acquire": ("s", "w", 30), "get_lease": ("s",)}
    errors = []

    class Meddler:
        @hookimpl
        def event_recorded(self, event: Event) -> None:
            try:
                getattr(store, call)(*calls.get(call, ()))
            except ReentrancyError as error:
                errors.append(error)

    store = StateStore(path, plugins=[Meddler()])
    store.initialize()
    assert [error.facts["hook"] for error in errors] == ["event_recorded"]
    assert store.acquire("s", "w", 30).token == 1


def test_a_veto_that_calls_the_store_refuses_the_write(path: Path) -> None:
    class Meddler:
        @hookimpl
        def check_fence(self, write: Write) -> None:
            store.get_lease("release")

    store = opened(path, Meddler())
    with pytest.raises(FenceRefusedError, match="ReentrancyError"):
        store.put_checkpoint("deploy", 1, lease=store.acquire("release", "worker-a", 30))


def offer(folder: Path, entry_points: str) -> None:
    info = folder / "fake-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text(entry_points)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")


def test_installed_plugins_are_found_by_their_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[console_scripts]\nx = y:z\n[agent_checkpoint]\none = a:b\ntwo=c:d\n[other]\nthree = e:f\n"
    offer(tmp_path / "site", text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "missing")])

    assert plugins.installed() == ["one", "two"]
    monkeypatch.setenv("AGENT_CHECKPOINT_PLUGINS", "two, four")
    assert plugins.installed() == ["two"]
    monkeypatch.setenv("AGENT_CHECKPOINT_PLUGINS", "off")
    assert plugins.installed() == []


def test_a_plugin_that_cannot_be_loaded_refuses_every_protected_write(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "site", "[agent_checkpoint]\nmissing = nowhere_at_all:plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    store = opened(path)
    lease = store.acquire("release", "worker-a", 30)
    with pytest.raises(FenceRefusedError, match="cannot be loaded") as refused:
        store.put_checkpoint("deploy", 1, lease=lease)
    assert refused.value.plugin == "missing"
    store.put_checkpoint("unprotected", 1)
    (check,) = [check for check in store.doctor() if check.check == "plugins"]
    assert check.verdict == "broken"


def test_doctor_names_the_plugins_and_their_hooks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_CHECKPOINT_PLUGINS", "absent")
    store = opened(path, Listener(), Veto(None))
    (check,) = [check for check in store.doctor() if check.check == "plugins"]
    assert sorted(hook for plugin in check.value for hook in plugin["hooks"]) == ["check_fence", "event_recorded"]
    assert (check.verdict, "absent" in check.message) == ("warning", True)


def test_without_a_plugin_pluggy_is_never_imported(path: Path) -> None:
    import subprocess

    code = (
        "import sys; from agent_checkpoint import StateStore; s = StateStore(sys.argv[1]); s.initialize();"
        "s.put_checkpoint('w', 1, lease=s.acquire('s', 'o', 30));"
        "slow = {'pluggy', 'importlib.metadata', 'typing', 'dataclasses', 'logging', 'asyncio', 'subprocess'};"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(path)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(plugins.__file__).parent.parent)},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
