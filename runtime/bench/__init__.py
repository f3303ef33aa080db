"""The deployment benchmark: what speculation brings on this machine, with this bundle and text.

`python -m runtime bench` runs it; the modules go from prompts over plan, measure and summary to
the report.
"""

from .command import EXAMPLE, bench_command

__all__ = ["EXAMPLE", "bench_command"]
