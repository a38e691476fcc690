"""The drafter in the documentation runs unchanged, in one file, through the conformance kit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from outrider import Drafter

PAGE = Path(__file__).parents[2] / "docs" / "write-a-drafter.md"


def test_the_example_of_the_documentation_passes_the_conformance_kit(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    file = tmp_path / "echo.py"
    file.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 1000


def test_a_drafter_has_at_most_ten_public_members() -> None:
    assert len([name for name in vars(Drafter) if not name.startswith("_")]) <= 10
