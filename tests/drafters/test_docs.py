"""The drafter in the documentation runs unchanged, in one file, through the conformance kit."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from outrider import Drafter

PAGE = Path(__file__).parents[2] / "docs" / "write-a-drafter.md"


def test_the_example_of_the_documentation_passes_the_conformance_kit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    file = tmp_path / "echo.py"
    file.write_text(code, encoding="utf-8")
    runpy.run_path(str(file), run_name="__main__")
    assert int(capsys.readouterr().out.split()[0]) > 1000


def test_a_drafter_has_at_most_ten_public_members() -> None:
    assert len([name for name in vars(Drafter) if not name.startswith("_")]) <= 10
