"""The router sends each request to the engine that has its documents. It imports no torch."""
