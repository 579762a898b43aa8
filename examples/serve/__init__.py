"""Serve a model over HTTP, and measure the server."""
