"""The example plugin, installed by pip into a fresh environment, acting on real processes.

The environment has what pip put there and nothing of the environment that runs
the tests. Hours are set so that the time of day does not matter: a closed window
opens in half a day, an open one began six hours ago and ends in six hours.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/business-hours"
PLUGIN = "business-hours"
LONG_TTL = "3600"

Result = subprocess.CompletedProcess[str]


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced code blocks of a page: (language, code)."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


class Place(NamedTuple):
    """A folder with a store, and the environment variables of the processes that work there."""

    folder: Path
    environ: dict[str, str]

    def run(self, *words: str, **environ: str) -> Result:
        return subprocess.run(
            words,
            cwd=self.folder,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            umask=0,
        )

    def command(self, *words: str, **environ: str) -> Result:
        return self.run("agent-checkpoint", *words, **environ)

    def put(self, workflow: str, data: str, *words: str, **environ: str) -> Result:
        """A protected write under the lease that ``place`` begins with."""
        fence = ("--lease-scope", "release", "--owner", "worker-a", "--token", "1")
        return self.command("checkpoint", "put", workflow, "--data", data, *fence, *words, **environ)

    def answer(self, *words: str) -> Any:
        """What a command answers that is neither vetoed nor heard."""
        return json.loads(succeeded(self.command(*words, AGENT_CHECKPOINT_PLUGINS="off")).stdout)

    def python(self, code: str, *arguments: str, **environ: str) -> Result:
        return self.run("python", "-c", code, *arguments, **environ)

    @property
    def log(self) -> Path:
        return self.folder / "events.jsonl"

    def heard(self) -> list[str]:
        return self.log.read_text("ascii").splitlines() if self.log.exists() else []

    def recorded(self) -> list[str]:
        """Every event of the store as the command prints it, oldest first."""
        return succeeded(self.command("events", "--limit", "1000", "--format", "jsonl")).stdout.splitlines()


def succeeded(result: Result) -> Result:
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def by_id(line: str) -> int:
    return json.loads(line)["id"]


def window(opens: datetime, closes: datetime) -> dict[str, str]:
    return {"AGENT_CHECKPOINT_HOURS": f"{opens:%H:%M}-{closes:%H:%M}"}


def closed() -> dict[str, str]:
    """Hours that begin in half a day."""
    now = datetime.now(timezone.utc)
    return window(now + timedelta(hours=12), now + timedelta(hours=13))


def open_now() -> dict[str, str]:
    """Hours that began six hours ago and end in six hours."""
    now = datetime.now(timezone.utc)
    return window(now - timedelta(hours=6), now + timedelta(hours=6))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of a fresh virtual environment into which the example was installed as its README says."""
    venv = tmp_path_factory.mktemp("example") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, capture_output=True)
    foreign = ("AGENT_CHECKPOINT_", "PYTHON", "VIRTUAL_ENV", "COVERAGE_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{environ['PATH']}"
    language, install = blocks(EXAMPLE / "README.md")[0]
    assert (language, install) == ("sh", "python -m pip install ./packages/core ./examples/business-hours\n")
    succeeded(Place(ROOT, environ).run("sh", "-c", install, PIP_DISABLE_PIP_VERSION_CHECK="1"))
    return environ


@pytest.fixture
def empty(installed: dict[str, str], tmp_path: Path) -> Place:
    """No store yet; events will be heard in its log."""
    log = tmp_path / "events.jsonl"
    return Place(tmp_path, {**installed, "AGENT_CHECKPOINT_EVENT_LOG": str(log)})


@pytest.fixture
def place(empty: Place) -> Place:
    """A store in which worker-a holds ``release`` with token 1 and has saved one step of ``deploy``."""
    succeeded(empty.command("init"))
    succeeded(empty.command("lease", "acquire", "release", "--owner", "worker-a", "--ttl", LONG_TTL))
    succeeded(empty.put("deploy", '{"step": 1}'))
    return empty


# The veto


def test_outside_the_hours_a_write_exits_77_with_one_json_error_that_names_the_plugin(place: Place) -> None:
    refused = place.put("deploy", '{"step": 2}', **closed())

    assert refused.returncode == 77
    assert refused.stdout == ""
    error = json.loads(refused.stderr)["error"]
    assert error["code"] == "fence-refused"
    assert error["plugin"] == PLUGIN
    assert error["retryable"] is False


def test_a_refusal_says_when_writes_are_open_again(place: Place) -> None:
    opens = datetime.now(timezone.utc).replace(second=0, microsecond=0) + timedelta(hours=12)
    hours = window(opens, opens + timedelta(hours=1))

    reason = json.loads(place.put("deploy", "2", **hours).stderr)["error"]["reason"]

    shown = f"{hours['AGENT_CHECKPOINT_HOURS']} mon-sun UTC"
    assert reason == f"writes are closed until {opens.isoformat()} ({shown})"


def test_a_refused_write_changes_no_checkpoint(place: Place) -> None:
    before = place.answer("checkpoint", "get", "deploy"), place.answer("checkpoint", "history", "deploy")

    assert place.put("deploy", '{"step": 2}', **closed()).returncode == 77

    assert (place.answer("checkpoint", "get", "deploy"), place.answer("checkpoint", "history", "deploy")) == before


def test_a_refused_write_is_on_record_with_the_plugin_s_name(place: Place) -> None:
    reason = json.loads(place.put("deploy", "2", **closed()).stderr)["error"]["reason"]

    (event,) = place.answer("events", "--kind", "write.refused")
    assert event["detail"] == {"action": "checkpoint.put", "component": "core", "plugin": PLUGIN, "reason": reason}
    fence = ("release", "worker-a", 1, "deploy")
    assert (event["scope"], event["owner"], event["token"], event["workflow"]) == fence


def test_inside_the_hours_a_write_passes(place: Place) -> None:
    assert json.loads(succeeded(place.put("deploy", "2", **open_now())).stdout)["sequence"] == 2


def test_after_the_hours_opened_the_refused_write_passes(place: Place) -> None:
    assert place.put("deploy", "2", **closed()).returncode == 77

    succeeded(place.put("deploy", "2", **open_now()))

    assert place.answer("checkpoint", "get", "deploy")["data"] == 2


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AGENT_CHECKPOINT_HOURS", "9 to 5"),
        ("AGENT_CHECKPOINT_HOURS", ""),
        ("AGENT_CHECKPOINT_DAYS", "weekdays"),
        ("AGENT_CHECKPOINT_HOURS_TZ", "Europe/Atlantis"),
    ],
)
def test_hours_that_are_not_understood_refuse_the_write_and_name_the_setting(
    place: Place, variable: str, value: str
) -> None:
    refused = place.put("deploy", "2", **{**open_now(), variable: value})

    assert refused.returncode == 77
    assert refused.stdout == ""
    error = json.loads(refused.stderr)["error"]
    assert error["plugin"] == PLUGIN
    assert error["reason"].startswith(f"{variable}={value!r} ")
    assert place.answer("checkpoint", "get", "deploy")["sequence"] == 1


def test_outside_the_hours_leases_and_unprotected_writes_pass(place: Place) -> None:
    held = ("release", "--owner", "worker-a", "--token", "1")

    succeeded(place.command("lease", "heartbeat", *held, **closed()))
    succeeded(place.command("checkpoint", "put", "notes", "--data", "1", **closed()))
    succeeded(place.command("lease", "release", *held, **closed()))
    succeeded(place.command("lease", "acquire", "release", "--owner", "worker-b", **closed()))


def test_outside_the_hours_leaving_a_protecting_scope_is_refused(place: Place) -> None:
    moved = place.command("checkpoint", "put", "deploy", "--data", "2", "--rebind", **closed())

    assert moved.returncode == 77
    assert place.answer("checkpoint", "get", "deploy")["scope"] == "release"


IN_PYTHON = """
import json
from agent_checkpoint import Fence, FenceRefusedError, StateStore

fence = Fence("release", "worker-a", 1)
with StateStore(".agent-checkpoint/state.db") as store:
    try:
        store.put_checkpoint("deploy", {"step": 2}, lease=fence)
    except FenceRefusedError as refused:
        print(json.dumps([refused.plugin, refused.reason, store.events(1)[0].detail["plugin"]]))
    print(json.dumps(store.get_checkpoint("deploy").sequence))
"""


def test_python_gets_the_same_refusal_as_the_command(place: Place) -> None:
    refused, sequence = map(json.loads, succeeded(place.python(IN_PYTHON, **closed())).stdout.splitlines())

    assert refused[0] == PLUGIN
    assert refused[1].startswith("writes are closed until ")
    assert refused[2] == PLUGIN
    assert sequence == 1


def test_inside_the_hours_a_write_from_python_passes(place: Place) -> None:
    assert succeeded(place.python(IN_PYTHON, **open_now())).stdout == "2\n"


# The event log


def test_every_event_of_several_commands_is_heard_exactly_once_and_in_order(place: Place) -> None:
    held = ("release", "--owner", "worker-a", "--token", "1")
    place.put("deploy", "2", **closed())
    place.command("lease", "acquire", "release", "--owner", "worker-b")
    for words in (
        ("checkpoint", "put", "notes", "--data", '"größe"'),
        ("checkpoint", "put", "deploy", "--data", "3", "--rebind"),
        ("checkpoint", "prune", "--keep-last", "1"),
        ("lease", "heartbeat", *held),
        ("lease", "release", *held),
        ("lease", "acquire", "ümlaut", "--owner", "worker-b"),
        ("lease", "force-release", "ümlaut", "--reason", "it is over"),
        ("init",),
        ("events",),
        ("status",),
    ):
        succeeded(place.command(*words))

    kinds = {json.loads(line)["kind"] for line in place.heard()}
    assert kinds >= {
        *("store.initialized", "lease.acquired", "lease.heartbeat", "lease.released", "lease.force-released"),
        *("checkpoint.saved", "checkpoint.rebound", "checkpoint.pruned", "write.refused"),
    }
    assert place.heard() == place.recorded()


WORKER = """
import sys, threading
from agent_checkpoint import LeaseHeldError, StateStore

THREADS, ROUNDS = 2, 12
name = sys.argv[1]
store = StateStore(".agent-checkpoint/state.db", busy_timeout_seconds=60)

def work(thread):
    for number in range(ROUNDS):
        try:
            scope = "shared" if number % 3 == 0 else f"{name}-{thread}"
            lease = store.acquire(scope, name)
        except LeaseHeldError:
            continue
        store.put_checkpoint(scope, {"by": name, "filling": "x" * 2000}, lease=lease)
        store.release(lease.scope, lease.owner, lease.token)

threads = [threading.Thread(target=work, args=(each,)) for each in range(THREADS)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_every_event_of_processes_at_work_at_once_is_heard_exactly_once(place: Place) -> None:
    others = [
        subprocess.Popen(["python", "-c", WORKER, f"process-{number}"], cwd=place.folder, env=place.environ)
        for number in range(6)
    ]
    for number in range(10):
        succeeded(place.put("deploy", str(number), "--busy-timeout", "60"))
    assert [other.wait(timeout=120) for other in others] == [0] * len(others)

    heard, recorded = place.heard(), place.recorded()
    assert 300 < len(recorded) < 1000
    assert len({by_id(line) for line in heard}) == len(heard)
    assert sorted(heard, key=by_id) == recorded


def test_the_event_log_is_readable_by_its_owner_only(place: Place) -> None:
    assert place.log.stat().st_mode & 0o777 == 0o600


def test_without_an_event_log_nothing_is_written_beside_the_store(empty: Place) -> None:
    succeeded(empty.command("init", AGENT_CHECKPOINT_EVENT_LOG=""))

    assert [each.name for each in empty.folder.iterdir()] == [".agent-checkpoint"]


def test_an_event_log_that_cannot_be_written_does_not_stop_the_write(place: Place) -> None:
    saved = succeeded(place.put("deploy", "2", AGENT_CHECKPOINT_EVENT_LOG=str(place.folder)))

    assert json.loads(saved.stdout)["sequence"] == 2
    assert f"plugin {PLUGIN} failed" in saved.stderr
    assert json.loads(place.recorded()[-1])["kind"] == "checkpoint.saved"


# Which plugins act


@pytest.mark.parametrize("allowed", ["off", "OFF", "other"])
def test_the_environment_can_silence_the_plugin(place: Place, allowed: str) -> None:
    before = place.heard()

    succeeded(place.put("deploy", "2", **closed(), AGENT_CHECKPOINT_PLUGINS=allowed))
    assert succeeded(place.python(IN_PYTHON, **closed(), AGENT_CHECKPOINT_PLUGINS=allowed)).stdout == "3\n"

    assert place.heard() == before


@pytest.mark.parametrize("allowed", [PLUGIN, f"other, {PLUGIN}", ""])
def test_the_environment_can_keep_the_plugin(place: Place, allowed: str) -> None:
    assert place.put("deploy", "2", **closed(), AGENT_CHECKPOINT_PLUGINS=allowed).returncode == 77

    assert json.loads(place.heard()[-1])["kind"] == "write.refused"
    assert place.heard() == place.recorded()


def test_doctor_shows_the_plugin_and_its_hooks(place: Place) -> None:
    checks = json.loads(succeeded(place.command("doctor")).stdout)["checks"]

    (plugins,) = (each["value"] for each in checks if each["check"] == "plugins")
    assert plugins == [{"plugin": PLUGIN, "hooks": ["check_fence", "event_recorded"]}]


# The pages


def test_the_example_s_readme_runs_as_printed(empty: Place) -> None:
    script = "".join(
        code if language == "sh" else f"python - <<'END'\n{code}END\n"
        for language, code in blocks(EXAMPLE / "README.md")[1:]
    )

    printed = succeeded(empty.run("bash", "-euo", "pipefail", "-c", script)).stdout

    assert "exit status 77\n1\n" in printed
    assert f"\n{PLUGIN}: writes are closed until " in printed


def test_the_plugins_page_runs_as_printed(empty: Place) -> None:
    module, program, project, install, follow = (code for _, code in blocks(ROOT / "docs/plugins.md"))
    (empty.folder / "freeze.py").write_text(module, "utf-8")
    (empty.folder / "pyproject.toml").write_text(project, "utf-8")
    (empty.folder / "program.py").write_text(program, "utf-8")
    refusal = "plugin 'freeze' refused the write: the file FREEZE exists"

    assert succeeded(empty.run("python", "program.py")).stdout == f"{refusal}\n"
    try:
        installed = succeeded(empty.run("bash", "-euo", "pipefail", "-c", install, PIP_DISABLE_PIP_VERSION_CHECK="1"))
    finally:
        empty.run("python", "-m", "pip", "uninstall", "--yes", "agent-checkpoint-freeze")

    assert installed.stdout.endswith("exit status 77\n")
    assert f'"message": "{refusal}"' in installed.stderr
    followed = succeeded(empty.python(follow)).stdout.splitlines()
    assert [line.split()[0] for line in followed] == [str(by_id(line)) for line in empty.heard()]
    assert succeeded(empty.python(follow)).stdout == ""


def test_a_plugin_passed_in_python_stays_when_installed_ones_are_off(empty: Place) -> None:
    module, program = (code for _, code in blocks(ROOT / "docs/plugins.md")[:2])
    (empty.folder / "freeze.py").write_text(module, "utf-8")

    ran = succeeded(empty.python(program, AGENT_CHECKPOINT_PLUGINS="off"))

    assert ran.stdout.startswith("plugin 'freeze' refused the write: ")
    assert ran.stderr.startswith("1 store.initialized None\n")
    assert empty.heard() == []


def test_the_example_s_own_tests_pass() -> None:
    environ = {**os.environ, "PYTHONPATH": str(EXAMPLE / "src")}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]

    succeeded(subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120))
