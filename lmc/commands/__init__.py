"""The command line `lmc`."""
