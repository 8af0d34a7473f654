"""Shell completion, asked of the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_checkpoint.cli import main, run

from .conftest import WATCHDOG_SECONDS

# What readline does at a tab: put the line into COMP_WORDS and call the function.
ASK_BASH = r"""
eval "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
complete=$(complete -p agent-checkpoint)
function=${complete#*-F }
"${function%% *}"
printf '%s\n' "${COMPREPLY[@]}"
"""
# The same under the conditions that zsh's bashcompinit makes.
ASK_ZSH = r"""
compdef() { : }
script=$1
shift
eval "$script"
emulate -L sh
setopt kshglob noshglob braceexpand
COMPREPLY=()
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_agent_checkpoint
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``completion SHELL`` prints."""
    assert main(["completion", request.param]) == 0
    return capsys.readouterr().out


def shell(*command: str) -> str:
    """What a shell prints that has nothing to complain of."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")


BASH, ZSH, FISH = (pytest.mark.parametrize("script", [name], indirect=True) for name in ("bash", "zsh", "fish"))


def in_bash(script: str, *words: str) -> list[str]:
    return shell("bash", "--norc", "-c", ASK_BASH, "bash", script, "agent-checkpoint", *words).split()


@needs("bash")
@BASH
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("lease", "ac"), ["acquire"]),
        (("lease", "re"), ["release"]),
        (("checkpoint", "hi"), ["history"]),
        (("st",), ["status"]),
        (("checkpoint", "put", "deploy-v2", "--reb"), ["--rebind"]),
        (("lease", "acquire", "release", "--own"), ["--owner"]),
        (("lease", "acquire", "release", "--owner", "a", "--ex"), ["--export"]),
        (("--db", "agents.db", "lease", "ac"), ["acquire"]),
        (("frobnicate", "--reb"), []),
    ],
    ids=lambda part: " ".join(part),
)
def test_bash_completes_words_and_options(script: str, words: tuple[str, ...], completed: list[str]) -> None:
    assert in_bash(script, *words) == completed


@needs("bash")
@BASH
def test_bash_offers_everything_that_may_stand_there(script: str) -> None:
    assert in_bash(script, "") == sorted({name.split()[0] for name in run.COMMANDS})
    for group in run.GROUPS:
        # A group may be a command too, with options of its own.
        words = [word for word in in_bash(script, group, "") if not word.startswith("--")]
        assert sorted(words) == sorted(name.split()[1] for name in run.COMMANDS if name.startswith(f"{group} "))


@needs("bash")
@BASH
def test_bash_offers_exactly_the_options_of_a_command(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in run.COMMANDS:
        assert main([*name.split(), "--help"]) == 0
        told = {word.strip("[],") for word in capsys.readouterr().out.split()}

        assert set(in_bash(script, *name.split(), "--")) == {word for word in told if word.startswith("--")} - {"--"}


@needs("zsh")
@ZSH
def test_zsh_completes_words_and_options(script: str) -> None:
    offered = shell("zsh", "-f", "-c", ASK_ZSH, "zsh", script, "agent-checkpoint", "lease", "ac").split()
    assert "acquire" in offered
    assert "init" not in offered

    offered = shell(
        "zsh", "-f", "-c", ASK_ZSH, "zsh", script, "agent-checkpoint", "checkpoint", "put", "w", "--"
    ).split()
    assert "--rebind" in offered


@ZSH
def test_the_zsh_script_counts_words_by_arithmetic(script: str) -> None:
    """Zsh takes the C in ``${words:1:COMP_CWORD-1}`` for a modifier; where it is missing, this stands in for it."""
    assert ":COMP_CWORD" not in script


@needs("fish")
@FISH
def test_fish_completes_words_and_options(script: str, tmp_path: Path) -> None:
    def ask(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {tmp_path / 'completion.fish'}; complete -C '{line}'"],
            env={**os.environ, "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WATCHDOG_SECONDS,
            check=True,
        )
        return done.stdout.split()

    (tmp_path / "completion.fish").write_text(script)

    assert ask("agent-checkpoint lease ac") == ["acquire"]
    assert ask("agent-checkpoint checkpoint put w --reb") == ["--rebind"]


@pytest.mark.parametrize("script", ["bash", "zsh", "fish"], indirect=True)
def test_a_script_names_every_word_of_every_command(script: str) -> None:
    for name in run.COMMANDS:
        for word in name.split():
            assert word in script


def test_the_script_is_printed_as_it_is_whatever_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    assert main(["completion", "bash", "--format", "json"]) == 0
    assert capsys.readouterr().out == script
