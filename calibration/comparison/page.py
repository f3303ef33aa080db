"""stub"""

from pathlib import Path
from typing import Any


def write_page(path: Path, result: dict[str, Any]) -> None:
    path.write_text("<html></html>")
