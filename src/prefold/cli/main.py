"""`prefold`: reads the command line, runs the command, turns its errors into exit codes.

Importing this, and asking for help, imports neither torch nor transformers.

Exit codes: 0 success, 1 the engine failed (or the demo's runs differ), 2 wrong usage or input,
130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from prefold.cli.bench import BenchArgs
from prefold.cli.convert_mla import ConvertMLAArgs
from prefold.cli.demo import DemoArgs
from prefold.cli.doctor import DoctorArgs
from prefold.cli.explain import ExplainArgs
from prefold.cli.generate import GenerateArgs
from prefold.cli.layouts import LayoutsArgs
from prefold.cli.options import TYRO_CONFIG
from prefold.cli.serve import ServeArgs

DESCRIPTION = """Prefold serves long-context language models: one long prompt is prefilled by
several ranks at once, so that the first token comes sooner.

With --debug, anywhere on the command line, errors show where they came from and the engine
logs what it does.
"""

TEXT_OPTIONS = ("--prompt", "--stop", "--compare")
"""Options whose value may begin with a dash."""

Command = (
    Annotated[GenerateArgs, subcommand("generate")]
    | Annotated[ServeArgs, subcommand("serve")]
    | Annotated[BenchArgs, subcommand("bench")]
    | Annotated[LayoutsArgs, subcommand("layouts")]
    | Annotated[DoctorArgs, subcommand("doctor")]
    | Annotated[DemoArgs, subcommand("demo")]
    | Annotated[ExplainArgs, subcommand("explain")]
    | Annotated[ConvertMLAArgs, subcommand("convert-mla")]
)


def parse(argv: Sequence[str]) -> Any:
    """The command's arguments; leaves with SystemExit for --help (0) and wrong usage (2)."""
    arguments = _join_text_values(argv)
    command: Any = Command  # a union, which tyro turns into subcommands
    return tyro.cli(command, args=arguments, prog="prefold", description=DESCRIPTION, config=TYRO_CONFIG)


def _join_text_values(argv: Sequence[str]) -> list[str]:
    """`--compare "-tp 2"` -> `--compare=-tp 2`, or the value would be taken for an option.

    >>> _join_text_values(["bench", "--compare", "-tp 2", "--prompt"])
    ['bench', '--compare=-tp 2', '--prompt']
    """
    joined: list[str] = []
    rest = iter(argv)
    for argument in rest:
        value = next(rest, None) if argument in TEXT_OPTIONS else None
        joined.append(argument if value is None else f"{argument}={value}")
    return joined


def run(args: Any) -> int:
    """Run one parsed command; returns its exit code."""
    from importlib import import_module

    return import_module(type(args).__module__).run(args)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    _log_to_stderr(logging.DEBUG if debug else logging.WARNING)
    try:
        return run(parse(arguments))
    except KeyboardInterrupt:
        return _report("interrupted", 130, debug)
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): nobody is there to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        return _report(f"error: {_words(error)}", 2, debug)
    except RuntimeError as error:
        from prefold.engine.executor import EngineDeadError

        if not isinstance(error, EngineDeadError):
            raise
        return _report(f"error: {error}", 1, debug)


class _StderrHandler(logging.Handler):
    """`warning: ...` on whatever stderr is by then."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {self.format(record)}", file=sys.stderr)


def _log_to_stderr(level: int) -> None:
    logger = logging.getLogger("prefold")
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(_StderrHandler())


def _words(error: ValueError | OSError) -> str:
    """Without the number that the system gives an error, and with its file first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _report(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
