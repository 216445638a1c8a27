"""`python -m lmc` is the command `lmc`."""

from lmc.commands.cli import main

main()
