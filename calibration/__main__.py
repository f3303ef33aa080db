"""`python -m calibration`."""

from .cli import app

app(prog_name="python -m calibration")
