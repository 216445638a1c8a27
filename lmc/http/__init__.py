"""HTTP for administration: a server, a client, and addresses."""
