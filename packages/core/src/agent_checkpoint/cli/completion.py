"""``completion``: shell completion, written from the commands' own parsers."""

from __future__ import annotations

from agent_checkpoint.cli.parser import Answer, Command, parser_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

BASH = """\
_agent_checkpoint() {{
    local words="${{COMP_WORDS[*]:1:$((COMP_CWORD - 1))}}" current="${{COMP_WORDS[COMP_CWORD]}}" choices
    case " $words " in
{cases}
        *) choices="{first}" ;;
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
}}
complete -o default -F _agent_checkpoint agent-checkpoint
"""

ZSH = "autoload -Uz bashcompinit && bashcompinit\n" + BASH


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help='eval "$(agent-checkpoint completion bash)"')


def _completion(arguments: Namespace) -> Answer:
    script = _fish() if arguments.shell == "fish" else _bash(ZSH if arguments.shell == "zsh" else BASH)
    arguments.format = "text"
    return Answer({"shell": arguments.shell, "script": script}, script)


def _choices() -> dict[str, list[str]]:
    """What may follow each command and group: its subcommands, or its options."""
    from agent_checkpoint.cli.run import COMMANDS, command

    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        actions = parser_for(name, command(name))._actions
        found[name] = sorted(option for action in actions for option in action.option_strings if option[1] == "-")
        group, _, word = name.partition(" ")
        if word:
            found.setdefault(group, []).append(word)
    return found


def _first(choices: dict[str, list[str]]) -> list[str]:
    return sorted({name.split()[0] for name in choices})


def _bash(script: str) -> str:
    choices = _choices()
    longest_first = sorted(choices, key=lambda name: -len(name.split()))
    cases = "\n".join(f'        *" {name} "*) choices="{" ".join(choices[name])}" ;;' for name in longest_first)
    return script.format(cases=cases, first=" ".join(_first(choices)))


def _fish() -> str:
    choices = _choices()
    first = " ".join(_first(choices))
    lines = [f'complete -c agent-checkpoint -f -n "not __fish_seen_subcommand_from {first}" -a "{first}"']
    for name, words in choices.items():
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for word in words:
            long = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            lines.append(f'complete -c agent-checkpoint -n "{seen}" {long}')
    return "\n".join(lines) + "\n"


COMMANDS = {"completion": Command("Shell completion for bash, zsh or fish.", _arguments, _completion)}
