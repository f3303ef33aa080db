"""`python -m runtime`."""

from .cli import app

app(prog_name="python -m runtime")
