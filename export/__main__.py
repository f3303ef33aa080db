"""`python -m export`."""

from .cli import app

app(prog_name="python -m export")
