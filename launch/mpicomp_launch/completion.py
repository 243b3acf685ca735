"""Scripts that make shells complete the command line, made from the schema."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from mpicomp_launch.arguments import make_parser
from mpicomp_launch.options import FIELDS

FILES = ("FILE",)
DIRECTORIES = ("DIR",)
ONLY_BEFORE_COMMAND = "complete -c mpicomp-launch -n 'not __mpicomp_launch_command >/dev/null'"

BASH = """_mpicomp_launch() {{
    local IFS=$' \\t\\n' rest=$COMP_LINE i raw cur prev words=() at=()
    # bash takes words apart at : and =, as in --hosts a:4,b:4; what no blank parts is one word.
    for ((i = 0; i <= COMP_CWORD; i++)); do
        raw=${{COMP_WORDS[i]}}
        if ((i == 0)) || [[ $rest == [[:space:]]* ]]; then
            words+=("$raw") at+=("$i")
        else
            words[-1]+=$raw
        fi
        rest=${{rest#"${{rest%%[![:space:]]*}}"}}
        rest=${{rest#"$raw"}}
    done
    cur=${{words[-1]}} prev=${{words[-2]}}
    for ((i = 1; i < ${{#words[@]}} - 1; i++)); do
        case ${{words[i]}} in
            {with_value}) ((i++));;
            -*) ;;
            *)
                if declare -F _command_offset >/dev/null; then _command_offset "${{at[i]}}"
                else mapfile -t COMPREPLY < <(compgen -f -- "$raw"); fi
                return;;
        esac
    done
    if [[ $cur == --*=* ]]; then
        prev=${{cur%%=*}} cur=${{cur#*=}}
    fi
    case $prev in
{cases}
        *)
            if [[ $cur == -* ]]; then
                mapfile -t COMPREPLY < <(compgen -W {flags} -- "$cur")
            else
                mapfile -t COMPREPLY < <(compgen -c -- "$cur")
            fi;;
    esac
    # Of a word that was taken apart, only the last piece is replaced.
    [[ $raw == [:=] ]] && raw=
    COMPREPLY=("${{COMPREPLY[@]#"${{cur%"$raw"}}"}}")
}}
complete -o filenames -o bashdefault -F _mpicomp_launch mpicomp-launch
"""
ZSH = """#compdef mpicomp-launch
_mpicomp_launch() {{
    _arguments -S -A '-*' \\
{specs}
        '*::command:_normal'
}}
if [[ $funcstack[1] == _mpicomp-launch ]]; then
    _mpicomp_launch  # this file, found on fpath, is the function
else
    compdef _mpicomp_launch mpicomp-launch
fi
"""
FISH = """# COMMAND and its arguments, once they have begun
function __mpicomp_launch_command
    set -l words (commandline -opc)[2..-1]
    while set -q words[1]
        switch $words[1]
            case {with_value}
                set -e words[1..2]
            case '-*'
                set -e words[1]
            case '*'
                string escape -- $words
                return 0
        end
    end
    return 1
end
function __mpicomp_launch_complete
    if set -l words (__mpicomp_launch_command)
        complete -C (string join ' ' -- $words (commandline -ct))
    else
        __fish_complete_command
    end
end
complete -c mpicomp-launch -x -a '(__mpicomp_launch_complete)'
"""


@dataclass(frozen=True)
class Flag:
    """An option as shells see it: its forms, its help, what it takes (None: nothing)."""

    forms: tuple[str, ...]
    help: str
    value: str | None
    names: tuple[str, ...]


def flags() -> Iterator[Flag]:
    """All options."""
    for action in make_parser()._actions:
        if not action.option_strings:
            continue
        field = FIELDS.get(action.dest)
        names = field.metadata["kind"].names if field else tuple(action.choices or ())
        takes = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
        text = (action.help or "").replace("%%", "%")
        value = str(action.metavar or "VALUE") if takes else None
        yield Flag(tuple(action.option_strings), text, value, names)


def script(shell: str) -> str:
    """The script for bash, zsh or fish."""
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell]()


def bash() -> str:
    """For `source <(mpicomp-launch --completion bash)`."""
    cases = []
    for flag in flags():
        if flag.names:
            how = f"-W {shlex.quote(' '.join(flag.names))}"
        elif flag.value in FILES:
            how = "-f"
        elif flag.value in DIRECTORIES:
            how = "-d"
        elif flag.value:
            how = "-W ''"
        else:
            continue
        pattern = "|".join(flag.forms)
        cases.append(f'        {pattern}) mapfile -t COMPREPLY < <(compgen {how} -- "$cur");;')
    every = [form for flag in flags() for form in flag.forms]
    valued = [form for flag in flags() if flag.value for form in flag.forms]
    return BASH.format(
        with_value="|".join(valued), cases="\n".join(cases), flags=shlex.quote(" ".join(every))
    )


def zsh() -> str:
    """For a file `_mpicomp-launch` on fpath, or to be evaluated after compinit."""
    specs = []
    for flag in flags():
        text = flag.help.replace("[", "(").replace("]", ")").replace(":", "\\:")
        value = ""
        if flag.value:
            names = " ".join(name.replace(":", "\\:") for name in flag.names)
            what = "_files" if flag.value in FILES else "_files -/"
            is_path = flag.value in FILES + DIRECTORIES
            value = f":{flag.value}:" + (f"({names})" if names else what if is_path else " ")
        for form in flag.forms:
            if value and form.startswith("--"):
                form += "="  # its value may follow an equals sign
            specs.append(f"        {shlex.quote(f'*{form}[{text}]{value}')} \\")
    return ZSH.format(specs="\n".join(specs))


def fish() -> str:
    """For `mpicomp-launch --completion fish | source`."""
    valued = [form for flag in flags() if flag.value for form in flag.forms]
    lines = [FISH.format(with_value=" ".join(valued))]
    for flag in flags():
        forms = [
            f"-l {form[2:]}" if form.startswith("--") else
            f"-s {form[1:]}" if len(form) == 2 else f"-o {form[1:]}"
            for form in flag.forms
        ]  # fmt: skip
        words = [ONLY_BEFORE_COMMAND, *forms, f"-d {shlex.quote(flag.help)}"]
        if flag.names:
            words.append(f"-x -a {shlex.quote(' '.join(flag.names))}")
        elif flag.value:
            words.append("-r -F" if flag.value in FILES + DIRECTORIES else "-x")
        lines.append(" ".join(words))
    return "\n".join(lines) + "\n"
