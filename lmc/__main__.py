"""`python -m lmc` is the command `lmc`."""

from lmc.cli import main

main()
