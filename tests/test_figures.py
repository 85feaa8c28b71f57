"""The figures of the project, counted in a small checkout."""

import json
from pathlib import Path

import pytest

from tools.figures import ROOT, code_files, files_by_family, main, repeated_names


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that keeps every limit: two families, of which ``new`` builds on ``old``."""
    files = {
        "README.md": "# Title\n",
        "docs/internals/architecture.md": "\n" * 200,
        "docs/performance.md": "",
        "src/sensorium/recipe/registry.py": 'NAMES = {"old": "sensorium.models.families.old:Old",\n'
        '         "new_moe": "sensorium.models.families.new:New"}\n',
        "src/sensorium/models/families/old.py": 'TYPES = ("old",)\n',
        "src/sensorium/models/families/new.py": "from sensorium.models.families.old import TYPES\n",
        "src/sensorium/models/load.py": '"""Prose about old and new_moe."""\nfrom sensorium.models.families import old\n',
        "src/sensorium/kernels/a.cu": "\n\n",
        "src/sensorium/assets/config.json": '"new_moe"\n' * 9,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def counted(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[int]]:
    code = main(["--json"], root)
    return code, [figure["value"] for figure in json.loads(capsys.readouterr().out)]


def test_a_checkout_within_all_limits_is_fine(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Lines, files, repeated names, files of the family "old" (its own, registry.py, load.py, two outside src), pages.
    assert counted(checkout, capsys) == (0, [8, 5, 0, 5, 1, 200, 0])


def test_each_limit_that_is_broken_is_reported(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("models", "recipe", "kernels"):
        (checkout / f"src/sensorium/{folder}/size.py").write_text('SIZES = {"tiny:new_moe": 1}\n')
        (checkout / f"src/sensorium/{folder}/__init__.py").touch()
    (checkout / "docs/internals/architecture.md").write_text("\n" * 201)
    assert counted(checkout, capsys) == (1, [11, 11, 1, 7, 1, 201, 0])
    assert main([], checkout) == 1
    table = capsys.readouterr().out
    assert table.count("  over\n") == 3
    assert "size.py (3 files)" in table
    assert "src/sensorium/kernels/size.py" in table


def test_no_file_name_in_src_is_used_more_than_twice() -> None:
    assert repeated_names(code_files(ROOT)) == []


def test_every_family_has_its_own_file_and_one_line_of_names() -> None:
    for family, touched in files_by_family(ROOT, code_files(ROOT)).items():
        assert [path.name for path in touched] == [f"{family}.py", "registry.py"]
