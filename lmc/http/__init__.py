"""HTTP for administration: a small server, a client, and addresses."""
