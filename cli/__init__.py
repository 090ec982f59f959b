"""The command line: each command is a thin face of one library call."""

import io
import sys
import warnings

import click

from dualstore.errors import DualstoreError, DualstoreWarning

from . import ask, change, look, reproduction, run

__all__ = ["commands", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="dualstore")
def commands() -> None:
    """Ask a recorded training run which events drive a prediction."""


for _command in (
    *(run.demo, run.train, reproduction.reproduce, look.info),
    *(ask.query, ask.totals, ask.votes, ask.self_influence, ask.stiffness, ask.sql, change.reweigh),
    *(look.verify, look.index, look.merge),
):
    commands.add_command(_command)


def main() -> None:
    """Entry point: data on stdout, warnings and one-line errors on stderr; exit code 1 for errors, 2 for usage."""
    if sys.stdout is None:
        _fail("standard output is closed; nothing to print to", 1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the terminal cannot show
    warnings.showwarning = _show_warning
    warnings.simplefilter("always", DualstoreWarning)
    try:
        commands(prog_name="dualstore", standalone_mode=False)
    except DualstoreError as error:
        _fail(str(error), 1)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.UsageError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; Python would complain about it at exit
        sys.exit(141)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    click.echo(f"warning: {' '.join(str(message).split())}", err=True)


def _fail(message: str, code: int) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)
