"""Who else is asked and told: plugins given by the program (installed ones: tests/end_to_end)."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from agent_checkpoint import (
    Event,
    FencedWrite,
    FenceRefusedError,
    InvalidInputError,
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

    assert plugins.installed() == {"one": {"fake"}, "two": {"fake"}}
    monkeypatch.setenv("AGENT_CHECKPOINT_PLUGINS", "two, four")
    assert plugins.installed() == {"two": {"fake"}}
    monkeypatch.setenv("AGENT_CHECKPOINT_PLUGINS", "off")
    assert plugins.installed() == {}


WITHOUT_DESCRIPTORS = """
import os, resource, sys
from agent_checkpoint import FenceRefusedError, StateStore, StorageError
sys.path.insert(0, sys.argv[2])
store = StateStore(sys.argv[1])
lease = store.acquire("release", "worker-a", 30)
another = StateStore(sys.argv[1])
another.get_lease("release")
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, limit), limit))
full = []
try:
    while True:
        full.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    StateStore(sys.argv[1])
except StorageError as error:
    print(type(error).__name__)
for _ in range(2):
    try:
        another.put_checkpoint("deploy", 1, lease=lease)
        said = "written"
    except (StorageError, FenceRefusedError) as error:
        said = type(error).__name__ + ": " + str(error)
    while full:
        os.close(full.pop())
    print(said)
"""


def test_without_descriptors_a_veto_is_not_taken_for_absent(path: Path, tmp_path: Path) -> None:
    offer(tmp_path / "site", "[agent_checkpoint]\nveto = veto_for_a_test\n")
    code = "@hookimpl\ndef check_fence(write):\n    raise FenceRefusedError('never')\n"
    module(tmp_path / "site", "veto_for_a_test", "from agent_checkpoint import FenceRefusedError, hookimpl\n" + code)
    opened(path).close()
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(path), str(tmp_path / "site")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert said[0] == "StorageUnreachableError"
    assert "cannot be looked at for plugins" in said[1]
    assert said[2] == "FenceRefusedError: plugin 'veto' refused the write: never"


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
        "slow.add('threading');"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(path)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(plugins.__file__).parent.parent)},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def module(folder: Path, name: str, code: str) -> None:
    (folder / f"{name}.py").write_text("from agent_checkpoint import StateStore, hookimpl\n" + code)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def check_fence(write): pass\n", "implements no hook"),
        ("@hookimpl\ndef chek_fence(write): pass\n", "chek_fence"),
        ("@hookimpl\ndef check_fence(right): pass\n", "right"),
        ("raise SystemExit(3)\n", "SystemExit"),
        ("StateStore('any.db').list_leases()\n", "ReentrancyError"),
    ],
)
def test_an_installed_plugin_that_is_broken_refuses_and_says_why(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    offer(tmp_path / "site", "[agent_checkpoint]\n# old = gone\nbad = bad_plugin_for_a_test\n")
    module(tmp_path / "site", "bad_plugin_for_a_test", code)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "bad_plugin_for_a_test", raising=False)
    store = opened(path)
    with pytest.raises(FenceRefusedError, match=why) as refused:
        store.put_checkpoint("deploy", 1, lease=store.acquire("release", "worker-a", 30))
    assert refused.value.plugin == "bad"
    monkeypatch.delitem(sys.modules, "bad_plugin_for_a_test", raising=False)


def test_two_distributions_that_offer_one_name_refuse_rather_than_hide_one(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "site", "[agent_checkpoint]\nguard = a:b\n")
    (tmp_path / "site" / "fake-1.0.dist-info").rename(tmp_path / "site" / "other-1.0.dist-info")
    offer(tmp_path / "site", "[agent_checkpoint]\nguard = c:d\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    store = opened(path)
    with pytest.raises(FenceRefusedError, match="fake, other"):
        store.put_checkpoint("deploy", 1, lease=store.acquire("release", "worker-a", 30))


def test_a_plugin_that_is_installed_and_passed_is_asked_once(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "site", "[agent_checkpoint]\nboth = both_plugin_for_a_test\n")
    module(
        tmp_path / "site",
        "both_plugin_for_a_test",
        "heard = []\n@hookimpl\ndef event_recorded(event): heard.append(event.id)\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    import importlib

    plugin = importlib.import_module("both_plugin_for_a_test")
    store = opened(path, plugin, plugin)
    assert plugin.heard == [event.id for event in store.events()]
    monkeypatch.delitem(sys.modules, "both_plugin_for_a_test")


def test_passed_plugins_are_named_for_people(path: Path) -> None:
    store = opened(path, Veto(None), Veto(FenceRefusedError("no", hint="ask Ann", opens_at="9:00")))
    with pytest.raises(FenceRefusedError) as refused:
        store.put_checkpoint("deploy", 1, lease=store.acquire("release", "worker-a", 30))
    assert (refused.value.plugin, refused.value.hint, refused.value.facts["opens_at"]) == ("Veto#2", "ask Ann", "9:00")


@pytest.mark.parametrize("plugin", [type("Bad", (), {"chek_fence": hookimpl(lambda self, write: None)})(), []])
def test_a_passed_object_that_is_no_plugin_is_invalid(path: Path, plugin: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        StateStore(path, plugins=[plugin])
    assert refused.value.field == "plugins"


def test_a_veto_by_exit_refuses_like_any_other(path: Path) -> None:
    class Quitter:
        @hookimpl
        def check_fence(self, write: Write) -> None:
            sys.exit(0)

    store = opened(path, Quitter())
    with pytest.raises(FenceRefusedError, match="SystemExit"):
        store.put_checkpoint("deploy", 1, lease=store.acquire("release", "worker-a", 30))


def test_plugins_are_loaded_before_the_write_lock_is_taken(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StateStore(path).initialize()
    offer(tmp_path / "site", "[agent_checkpoint]\nlocker = locker_for_a_test\n")
    code = (
        "import os, sqlite3\n"
        "other = sqlite3.connect(os.environ['THE_STORE'], timeout=0)\n"
        "other.execute('BEGIN IMMEDIATE')\nother.execute('ROLLBACK')\nother.close()\n"
        "@hookimpl\ndef event_recorded(event): pass\n"
    )
    module(tmp_path / "site", "locker_for_a_test", code)
    monkeypatch.setenv("THE_STORE", str(path))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with StateStore(path) as store:
        assert store.acquire("release", "worker-a", 30).token == 1
        (check,) = [check for check in store.doctor() if check.check == "plugins"]
    assert check.verdict == "ok"
    monkeypatch.delitem(sys.modules, "locker_for_a_test")
