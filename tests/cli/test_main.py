"""Commands tell what they are, refuse mistakes in one paragraph, and spend nothing in a dry run."""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import sensorium as package
from sensorium.cli.main import COMMANDS, EXIT_CODES, PARTS, ExitCode, main, place_of, warning_text
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import NonFiniteModel, NothingTrained, SensoriumError
from tools.cli_page import page

SOURCES = str(Path(package.__file__).resolve().parents[1])
ENVIRONMENT = os.environ | {"PYTHONPATH": SOURCES}

RECIPE = """\
name: trial
steps: 4
model: {path: "tiny:qwen3_vl"}
tasks:
  train: [{source: shapes, options: {size: 64}}]
batch: {prompts_per_step: 4, group_size: 4}
rewards: {terms: [{name: exact}, {name: format, weight: 0.1}]}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "trial.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_a_warning_of_ours_is_a_paragraph_and_others_have_their_place() -> None:
    ours = warning_text("no room", UserWarning, str(Path(SOURCES) / "sensorium" / "workers" / "ray_cluster.py"), 3)
    assert ours == "warning: no room\n"
    assert warning_text("old", DeprecationWarning, "/lib/x.py", 3) == "warning: /lib/x.py:3: DeprecationWarning: old\n"


def sensorium(*arguments: str, check: str = "") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with a check of what it left behind."""
    code = f"import sys; from sensorium.cli.main import main; rc = main(sys.argv[1:]); {check or 'pass'}; sys.exit(rc)"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=600)


def test_help_names_every_command_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    bare = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == bare
    assert all(name in bare for name in COMMANDS)
    assert len(bare.splitlines()) <= 24


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_its_own_file_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert f"usage: sensorium {name}" in capsys.readouterr().out
    for whole in [f"{name} {part}" for part in PARTS.get(name, ())] or [name]:
        assert import_module(place_of(whole)).__file__


def test_the_page_of_commands_is_what_the_parsers_say() -> None:
    shown = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    assert shown == page(), "a command changed: run `make docs` and commit docs/reference/cli.md"
    assert all(f"## sensorium {name}" in shown for name in COMMANDS)


def test_every_exit_code_is_on_the_page_and_other_pages_agree() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert list(EXIT_CODES) == list(ExitCode)
    listed = re.findall(r"^\| (\d+) \| ", (docs / "reference/cli.md").read_text(), re.MULTILINE)
    assert listed == [str(code.value) for code in ExitCode]
    health = (docs / "reference/health.md").read_text()
    (stopped,) = [line for line in health.splitlines() if "`NothingTrained`" in line]
    (ruined,) = [line for line in health.splitlines() if "`NonFiniteModel`" in line]
    assert f"exit code {ExitCode.UNTRAINED.value}" in stopped
    assert f"exit code {ExitCode.ERROR.value}" in ruined


@pytest.mark.parametrize(
    ("error", "code"),
    [(NothingTrained("none of the 3 steps"), ExitCode.UNTRAINED), (NonFiniteModel("NaN"), ExitCode.ERROR)],
    ids=["untrained", "ruined"],
)
def test_an_error_has_the_exit_code_of_its_kind(
    error: SensoriumError, code: ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("sensorium.cli.main.run_command", fail)
    assert main(["train", "shapes"]) == code
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_that_wait_leave_the_cores_to_others_unless_told_otherwise(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "no_such_recipe"]) == 2
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    assert "no_such_recipe" in capsys.readouterr().err


def test_a_dry_run_prints_recipe_and_plan_and_loads_no_torch(recipe: str, tmp_path: Path) -> None:
    done = sensorium(
        "train", recipe, "--dry-run", "batch.group_size=8", "logging.loggers=[tensorboard]",
        check="assert 'torch' not in sys.modules",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "group_size: 8" in done.stdout
    assert "loggers: [tensorboard]" in done.stdout
    assert "32 episodes, one update of 4 groups" in done.stdout
    assert "repeats bit for bit" in done.stdout
    assert not Path("runs/trial").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["trial.yaml"]


def test_the_resolved_recipe_of_a_dry_run_is_a_recipe_and_says_how_many_prompts_a_step_may_play(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from sensorium.recipe import load_recipe, parse_recipe

    changes = ["steps=7", "selection={dynamic: true, oversample: 1.5}"]
    assert main(["train", recipe, *changes, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert parse_recipe(out[: out.index("a step")], "resolved") == load_recipe(recipe, changes)
    assert "at most 24 prompts, 96 episodes a step" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "there is no command 'trian'; did you mean 'train'?"),
        (["train", "no_such.yaml"], "there is no recipe file 'no_such.yaml'"),
        (["train", "RECIPE", "batch.groupsize=3"], "unknown key 'batch.groupsize'; did you mean 'group_size'?"),
        (["train", "RECIPE", "--dry-run", "rewards.terms.0.name=exakt"], "unknown reward 'exakt'; did you mean 'exact'?"),
        (["eval", "RECIPE"], "tasks.evaluate names no source"),
        (["export", "nowhere", "out"], "'nowhere' is neither a complete checkpoint nor a run directory"),
        (["replay", "nowhere"], "'nowhere' holds no kept batch"),
    ],
)
def test_a_mistake_is_one_paragraph_on_stderr(
    arguments: list[str], said: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe if argument == "RECIPE" else argument for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_wrong_argument_shows_the_usage(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", recipe, "--dryrun"])
    assert stopped.value.code == 2
    assert "unrecognized arguments: --dryrun; did you mean '--dry-run'?" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_python")
def test_things_of_the_users_own_are_found_beside_the_recipe(tmp_path: Path) -> None:
    made, scored = "def __init__(self, limit: int = 3) -> None: ...", "def score(self, task, episode): return 1.0"
    (tmp_path / "my_terms.py").write_text(f"class Brevity:\n    {made}\n    {scored}\n")
    text = RECIPE.replace("{name: exact}", "{name: 'my_terms:Brevity', options: {limt: 4}}")
    (tmp_path / "trial.yaml").write_text(text)
    command = [sys.executable, "-m", "sensorium.cli.main", "train", "trial.yaml", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "reward 'my_terms:Brevity' has no option 'limt'; did you mean 'limit'?" in done.stderr
    (tmp_path / "trial.yaml").write_text(text.replace("limt", "limit"))
    assert subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=600).returncode == 0


def test_the_demo_replaces_only_its_own_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sensorium.cli.demo import _clear_earlier
    from sensorium.recipe import parse_recipe

    monkeypatch.chdir(tmp_path)
    recipe = parse_recipe(RECIPE, "trial")
    mine, other = Path("runs/trial"), Path("runs/other")
    for folder, name in ((mine, "trial"), (other, "other")):
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(f"name: {name}\n")
    _clear_earlier(recipe)
    assert not mine.exists()
    assert other.exists()
    shutil.copytree(other, mine)
    _clear_earlier(recipe)
    assert mine.exists()


def test_resuming_what_is_no_run_speaks_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes_a").mkdir()
    (tmp_path / "shapes_a" / "recipe.yaml").write_text(RECIPE)
    assert main(["train", str(tmp_path / "shapes_b"), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "there is no run" in said
    assert "shapes_a" in said
    assert "recipe file" not in said


def test_an_interrupt_before_the_first_checkpoint_does_not_promise_one(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run").create()
    assert "the same command starts over" in directory.how_to_continue()
    directory.metrics.write_text("{}")
    assert "the same command with --restart starts over" in directory.how_to_continue()
    directory.checkpoint_of(1).mkdir()
    assert directory.how_to_continue().endswith(f"sensorium train {directory.path} --resume")
