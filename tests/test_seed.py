"""The quick start as its users type it, in shell and in Python, with the standard library alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from typing import Any

DATABASE = ".state/agents.db"
BLOCK_PLUGGY = "import sys; sys.modules['pluggy'] = None; sys.argv[0] = 'agent-checkpoint'; "

PROGRAM = """
from agent_checkpoint import StateStore
store = StateStore(".state/agents.db")
store.initialize()
lease = store.acquire("release", "worker-a", ttl_seconds=60)
store.put_checkpoint(
    "deploy-v2", {"stage": "tests-passed"}, lease_scope=lease.scope, owner=lease.owner, token=lease.token
)
store.release(lease.scope, lease.owner, lease.token)
"""


class SeedScenario(unittest.TestCase):
    """Two workers, one release: the second goes on, the first comes back too late."""

    preamble = "import sys; "

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def python(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT")}
        return subprocess.run(
            [sys.executable, "-c", self.preamble + code, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def run_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        code = "from agent_checkpoint.cli import main; sys.exit(main())"
        return self.python(code, "--db", DATABASE, *words)

    def answer(self, *words: str) -> Any:
        done = self.run_command(*words)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.args)
        return json.loads(done.stdout)

    def refusal(self, *words: str) -> Any:
        done = self.run_command(*words)
        self.assertEqual((done.returncode, done.stdout), (76, ""), done.args)
        return json.loads(done.stderr)["error"]

    def put(self, stage: str, owner: str, token: int, scope: str = "release") -> tuple[str, ...]:
        fence = ("--lease-scope", scope, "--owner", owner, "--token", str(token))
        return ("checkpoint", "put", "deploy-v2", "--data", json.dumps({"stage": stage}), *fence)

    def test_the_quick_start_in_shell(self) -> None:
        self.assertTrue(self.answer("init")["created"])
        lease = self.answer("lease", "acquire", "release", "--owner", "worker-a", "--ttl", "60")
        self.assertEqual((lease["owner"], lease["scope"], lease["token"]), ("worker-a", "release", 1))
        saved = self.answer(*self.put("tests-passed", "worker-a", 1))
        self.assertEqual((saved["sequence"], saved["token"]), (1, 1))
        self.assertEqual(self.answer("checkpoint", "get", "deploy-v2")["data"], {"stage": "tests-passed"})
        fence = ("--owner", "worker-a", "--token", "1")
        self.assertEqual(self.answer("lease", "heartbeat", "release", *fence, "--ttl", "60")["token"], 1)
        self.assertEqual(self.answer("lease", "release", "release", *fence)["state"], "released")

        self.assertEqual(self.answer("lease", "acquire", "release", "--owner", "worker-b")["token"], 2)
        self.assertEqual(self.refusal(*self.put("late", "worker-a", 1))["reason"], "superseded")
        self.assertEqual(self.answer("checkpoint", "get", "deploy-v2"), saved)
        refused = self.answer("events", "--kind", "write.refused")
        self.assertEqual([(event["owner"], event["token"]) for event in refused], [("worker-a", 1)])

    def test_a_protected_workflow_takes_no_other_writes(self) -> None:
        self.answer("init")
        self.answer("lease", "acquire", "release", "--owner", "worker-a")
        self.answer("lease", "acquire", "other", "--owner", "worker-c")
        self.answer(*self.put("built", "worker-a", 1))
        unprotected = ("checkpoint", "put", "deploy-v2", "--data", "{}")
        self.assertEqual(self.refusal(*unprotected)["reason"], "protected")
        elsewhere = self.put("moved", "worker-c", 1, scope="other")
        self.assertEqual(self.refusal(*elsewhere)["reason"], "scope-mismatch")
        self.assertEqual(self.answer(*elsewhere, "--rebind")["scope"], "other")
        self.assertEqual(len(self.answer("events", "--kind", "checkpoint.rebound")), 1)

    def test_the_quick_start_in_python(self) -> None:
        done = self.python(PROGRAM)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.answer("lease", "show", "release", "--include-expired")["state"], "released")


class SeedScenarioWithoutPluggy(SeedScenario):
    """Core does all of it where pluggy cannot even be imported."""

    preamble = BLOCK_PLUGGY


if __name__ == "__main__":
    unittest.main()
