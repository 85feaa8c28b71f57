"""The project's files: the wheel runs outside the checkout, and what contributors are told is there."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

import sensorium

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the built wheel in it; the packages it needs are this environment's, found by path."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "fresh", with_pip=False)
    python = folder / "fresh/bin/python"
    (packages,) = (folder / "fresh").glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    subprocess.run(
        [*install, "--disable-pip-version-check", str(wheel)], env=outside_paths(), check=True, capture_output=True
    )
    shutil.rmtree(checkout)
    return folder / "fresh/bin"


def outside_paths() -> dict[str, str]:
    """The environment's variables without those that would let a Python find this checkout."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def outside(installed: Path, folder: Path, *command: str) -> str:
    """Run a command of the fresh environment, away from the checkout."""
    done = subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=folder,
        env=outside_paths() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAIN = """\
import sys
import sensorium
print(sensorium.__file__)
from sensorium.cli.main import main
assert main(["train", "shapes", "--dry-run"]) == 0
code = main(sys.argv[1:])
print("imported PyAV:", "av" in sys.modules)
sys.exit(code)
"""


def test_the_wheel_dry_runs_and_trains_two_steps_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    assert "train" in outside(installed, tmp_path, "sensorium", "--help")
    small = ["steps=2", "batch.prompts_per_step=8", "evaluation.limit=2", "health.sight_tasks=2"]
    found, said = outside(installed, tmp_path, "python", "-c", TRAIN, "train", "shapes", *small).split("\n", 1)
    assert Path(found).is_relative_to(installed.parent)
    assert (Path(found).parent / "py.typed").exists()
    assert "160 steps" in said
    assert said.endswith("imported PyAV: False\n"), "a run without clips does without it"
    assert len((tmp_path / "runs/shapes/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "runs/shapes/report.html").exists()


def test_the_licence_is_named_and_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


def test_what_contributors_are_pointed_to_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:src|tests|docs|studies|tools)/[\w./]*)`", text):
        assert (ROOT / path).exists() or "NAME" in path, path


def test_the_package_has_one_version_and_the_changelog_begins_with_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sensorium.__version__"}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == sensorium.__version__


def test_the_workflow_tests_the_pythons_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"
    for target in ("make test", "make versions"):
        assert any(target in step.get("run", "") for step in job["steps"])
        assert target in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[bf]*.yml")), ids=lambda form: form.stem)
def test_issue_forms_have_what_github_requires(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert content["name"]
    assert content["description"]
    assert len({field["id"] for field in content["body"]}) == len(content["body"])
    assert all(field["attributes"]["label"] for field in content["body"])


def test_pre_commit_runs_the_checks_of_make_test() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["entry"].replace(".venv/bin/", "$(BIN)/") for hook in local["hooks"]}
    makefile = (ROOT / "Makefile").read_text()
    wanted = {line.strip() for name in ("suite", "lint", "types") for line in _recipe_of(makefile, name)}
    assert hooks == wanted


def _recipe_of(makefile: str, target: str) -> list[str]:
    (body,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    return body.splitlines()


PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "SECURITY.md", "studies/README.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([\w./]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
    for named in re.findall(r"\bdocs/[\w/]+\.md\b", page.read_text()):
        assert (ROOT / named).exists(), named


@pytest.mark.parametrize("page", sorted((ROOT / "docs/internals").glob("*.md")), ids=lambda page: page.stem)
def test_files_named_on_pages_about_the_internals_are_there(page: Path) -> None:
    """By their path in the package or, after the folder was named, by their name alone."""
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|cu))`", page.read_text()) if "NAME" not in name}
    assert named <= {name for name in named if [*(ROOT / "src/sensorium").rglob(name), *ROOT.glob(name)]}


@pytest.mark.parametrize(
    ("page", "lines"), [("README.md", 130), ("docs/internals/architecture.md", 200), ("docs/internals/performance.md", 150)]
)
def test_pages_that_everybody_reads_stay_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= lines


def test_the_page_on_performance_has_the_measured_gain_of_every_kernel() -> None:
    """In its row of the table, or where the page lists what was deleted."""
    page = (ROOT / "docs/internals/performance.md").read_text()
    deleted = page[page.index("Deleted by this measurement") :].partition("## ")[0]
    for workload, found in json.loads((ROOT / "bench/baselines/kernels_h200.json").read_text()).items():
        for operation in found["operations"]:
            name, ratio = operation["operation"].partition(" (")[0], f"{operation['ratio']:.3f}"
            rows = re.findall(rf"^\| {re.escape(name)} \|.*$", page, re.MULTILINE)
            if rows:
                assert rows[0].split(" | ")[["W1", "W2", "W3"].index(workload) + 2].rstrip(" |") == ratio
            else:
                assert ratio in deleted, name
