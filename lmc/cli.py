"""The command `lmc`: each subcommand is a function with plain arguments; parsing is typer's.

A command raises what the library raises: `Commands` turns every `LmcError` into one line and exit code 2.
"""

import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from lmc.config import Settings, shown
from lmc.errors import LmcError

FAILED = 2  # the exit code of a command that lmc refused
UNCUT = 1 << 16  # columns: where nobody looks at the output, nothing has to fit


class Commands(TyperGroup):
    """All subcommands, and the one place that answers their errors."""

    def invoke(self, ctx: Any) -> Any:  # Any: typer's context class is click's, or since 0.29 a private copy of it
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except LmcError as error:
            typer.echo(f"error: {' '.join(str(error).splitlines())}", err=True)
            raise typer.Exit(FAILED) from None


# No pretty tracebacks: they may print local variables, and a URL there may hold a password.
app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def lmc() -> None:
    """Tiered KV cache offload and CacheBlend fusion."""


@app.command()
def config() -> None:
    """Show every setting, its effective value, and where that comes from."""
    console().print(settings_table(Settings.load()))


def settings_table(settings: Settings) -> Table:
    """One row for each setting."""
    table = Table("setting", "value", "from")
    for column in table.columns:
        column.overflow = "fold"  # an ellipsis would cut paths
    for name in Settings.model_fields:
        row = (name, shown(name, getattr(settings, name)), settings.origin(name))
        table.add_row(*map(Text, row))  # Text: nothing in a value is markup
    return table


def console() -> Console:
    """Standard output: as wide as the terminal, or as the longest line where there is none."""
    return Console(width=None if sys.stdout.isatty() else UNCUT)


def main() -> None:
    """Entry point of the command `lmc`."""
    app()
