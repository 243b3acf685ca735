"""The command line, made from the schema of `options.py`, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import FLAG, number_text
from mpicomp_launch.options import FIELDS, flag_of
from mpicomp_launch.resolve import COMMAND_LINE, Value, convert, nearest, stack

SHELLS = ("bash", "zsh", "fish")
SCHEDULERS = ("slurm", "pbs")
ACTIONS = ("check", "completion", "dry_run", "write_config", "write_script")
SEE_HELP = "; see `mpicomp-launch --help`"
USAGE = """%(prog)s [-np N] [--hosts LIST] [options] COMMAND [ARGS...]
       %(prog)s --check [options] [COMMAND ...]"""
DESCRIPTION = """Runs COMMAND on N ranks, on this host, on hosts reached by ssh, or within
the allocation of a scheduler, under the MPI which the command's Python loads.
What follows COMMAND belongs to it and is passed on as it is. When one rank
fails, the job ends, and the reason is shown last."""
EPILOG = """environment:
  MPICOMP_LAUNCH_<OPTION>   the same as --<option>, as in MPICOMP_LAUNCH_NP=4
  MPICOMP_COMPRESSION ...   the same as --compression, and so on for training
  MPICOMP_LAUNCH_CONFIG     the same as --config
  The command line wins over the environment, the environment over files.

files:
  --config takes TOML (.toml) and YAML (.yaml, .yml) with the names of the
  options as keys, `include`, and a section for each host that needs one;
  --write-config makes one. --hostfile has a host a line: `a`, `a:4`, `a 4`,
  `a slots=4 max-slots=8`, `node[01-16]:4`; `#` begins a comment.

exit status:
  that of the first rank that failed; 128 + n after signal n; 2 for a mistake
  before the start; 124 after --timeout; 125 if ranks did not come up.

examples:
  mpicomp-launch -np 4 python train.py
  mpicomp-launch --hosts a:4,b:4 --compression powersgd python train.py --lr 1
  mpicomp-launch --config cluster.yaml --dry-run python train.py
  mpicomp-launch --check --hosts a,b"""


@dataclass(frozen=True)
class Request:
    """What a command line asks for.

    Attributes:
        given: Options of the schema.
        words: COMMAND and its arguments.
        config: A file with more options.
        dry_run, check, json, write_config, write_script, completion: What to do instead of
            running the job.
    """

    given: Mapping[str, Value]
    words: tuple[str, ...]
    config: str | None
    dry_run: bool
    check: bool
    json: bool
    write_config: str | None
    write_script: str | None
    completion: str | None


class Parser(argparse.ArgumentParser):
    """argparse, with errors in our words and nothing else."""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print and exit for."""
        raise LaunchError(message + SEE_HELP)


def parse(argv: Sequence[str]) -> Request:
    """Reads a command line.

    Raises:
        LaunchError: An option is unknown, or its value will not do.
    """
    parser = make_parser()
    found, unknown = parser.parse_known_args(join_values(parser, argv))
    if unknown:
        word = unknown[0].partition("=")[0]
        near = nearest(word, parser._option_string_actions) or SEE_HELP
        raise LaunchError(f"{word} is not an option{near}")
    options = vars(found)
    words = options.pop("command")
    given: dict[str, Value] = {}
    for name in FIELDS:
        value = options.pop(name, None)
        for part in value if isinstance(value, list) else [value]:
            if part is not None:
                given |= stack({name: convert(name, part, COMMAND_LINE)}, given)
    check_actions(options)
    return Request(given, tuple(words[words[:1] == ["--"] :]), **options)


def check_actions(options: Mapping[str, Any]) -> None:
    """Only one thing can be done, and a name must be one."""
    asked = ["--" + name.replace("_", "-") for name in ACTIONS if options[name]]
    if len(asked) > 1:
        raise LaunchError(f"one thing to do must be given, got {' and '.join(asked)}")
    if options["json"] and not options["check"]:
        raise LaunchError("--json must be given with --check, got it without")
    for name in ("config", "write_config"):
        if options[name] == "":
            raise LaunchError(f"--{name.replace('_', '-')} must name a file, got ''")


def join_values(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Writes `--mpi-args -q` as `--mpi-args=-q`: argparse would take the value for an option."""
    takes_value = {
        flag for action in parser._actions if action.nargs is None for flag in action.option_strings
    }
    words = list(argv)
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        if words[at] in takes_value and at + 1 < len(words):
            value = words.pop(at + 1)
            if value == "--":  # argparse would drop it
                raise LaunchError(f"{words[at]} must be followed by its value, got --")
            words[at] += f"={value}"
        at += 1
    return words


def make_parser() -> argparse.ArgumentParser:
    """All options, in their groups."""
    parser = Parser(
        prog="mpicomp-launch",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add_actions(parser.add_argument_group("what to do"))
    groups: dict[str, Any] = {}
    for name, field in FIELDS.items():
        settings = field.metadata
        if settings["flags"] == ("",):
            continue
        title = settings["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flags = dict.fromkeys((*settings["flags"], flag_of(name)))
        groups[title].add_argument(*flags, dest=name, default=None, **how(name))
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def how(name: str) -> dict[str, Any]:
    """The remaining arguments of `add_argument` for an option."""
    field = FIELDS[name]
    settings = field.metadata
    text = settings["help"].replace("%", "%%")
    if settings["kind"] is FLAG:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if settings["kind"].names:
        text += f" ({', '.join(settings['kind'].names)})"
    if field.default not in (None, ()):
        text += (
            f"; default: {number_text(field.default)}"
            if isinstance(field.default, float)
            else (f"; default: {field.default}")
        )
    action = "append" if settings["repeats"] else "store"
    return {"action": action, "metavar": settings["metavar"], "help": text}


def add_actions(group: Any) -> None:
    """Options that say what to do, which no file can hold."""
    group.add_argument("--config", metavar="FILE", help="options from a TOML or YAML file")
    group.add_argument("--dry-run", action="store_true", help="show the command, do not run it")
    group.add_argument("--check", action="store_true", help="say what works here and what does not")
    group.add_argument("--json", action="store_true", help="with --check: as JSON")
    group.add_argument("--write-config", metavar="FILE", help="write these options to a file")
    group.add_argument("--write-script", choices=SCHEDULERS, help="print a batch script")
    group.add_argument("--completion", choices=SHELLS, help="print what makes a shell complete")
    group.add_argument(
        "--version", action=ShowVersion, nargs=0, default=argparse.SUPPRESS, help="show the version"
    )
    group.add_argument("-h", "--help", action="help", help="show this page")


class ShowVersion(argparse.Action):
    """Prints the version of the distribution; a source tree on the path has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Looks it up only now: that takes longer than all the rest of the start."""
        from importlib import metadata

        try:
            print(f"mpicomp {metadata.version('mpicomp')}")
        except metadata.PackageNotFoundError:
            print("mpicomp, not installed")
        parser.exit()
