"""Set-up: uv looks for packages where pip is told to look."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tools import install
from tools.install import compile_packages, mend_torchvision, settings_for_uv, settings_of_pip, unloadable
from tools.obtainable import reason, why_not


def test_uv_is_told_what_pip_is_told_and_the_environment_is_stronger_than_a_file() -> None:
    listed = """:env:.find-links='/wheels /more'
:env:.disable-pip-version-check='1'
global.find-links='/other'
global.extra-index-url='file:///a/simple file:///b/simple'
install.index-url='https://mirror.example/simple'
global.index-url='https://elsewhere.example/simple'
list.format='json'
"""
    assert settings_for_uv(listed) == {
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_a_setting_that_uv_does_not_have_leaves_the_installing_to_pip() -> None:
    assert settings_for_uv("global.client-cert='/key.pem'\n") is None


def test_what_pip_is_told_is_read_from_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/somewhere")
    listed = settings_of_pip()
    assert ":env:.find-links='/somewhere'" in listed
    settings = settings_for_uv(listed)
    assert settings is None or settings["UV_FIND_LINKS"] == "/somewhere"


def test_a_module_that_came_without_its_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "without_library.py").write_text("raise OSError('cannot load library')\n")
    (tmp_path / "with_library.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert unloadable(["without_library", "with_library", "not_installed"]) == ["without_library"]


def test_stock_transformers_prepares_pictures_in_this_environment_without_our_package(tmp_path: Path) -> None:
    """Also where torchvision was built for another torch; set-up installs what that takes (tools/install.py)."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    code = """
import sys
from PIL import Image
from transformers import AutoImageProcessor
import torchvision
pixels = AutoImageProcessor.from_pretrained(".")(images=Image.new("RGB", (56, 56)), return_tensors="pt").pixel_values
print(*pixels.shape, any(name.partition(".")[0] == "sensorium" for name in sys.modules))
"""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=bare, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["16", "1176", "False"], done.stderr[-2000:]


def test_the_mend_of_torchvision_itself_lets_it_be_imported() -> None:
    """The module of this tree, in a process that reads no .pth file and so none of the copies that set-up made."""
    code = """
import sys
sys.path += sys.argv[1:]
import sensorium.models.torchvision_fix as mend
assert mend.__file__.startswith(sys.argv[2]), mend.__file__
import torchvision.ops
"""
    source = Path(__file__).parents[1] / "src"
    packages = sysconfig.get_paths()["purelib"]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", code, packages, str(source)]
    done = subprocess.run(command, env=bare | {"PYTHONPATH": str(source)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_torchvision_that_does_not_load_is_mended_and_one_that_does_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unfit in (["torchvision"], []):
        monkeypatch.setattr("tools.install.unloadable", lambda names, unfit=unfit: unfit)
        assert mend_torchvision(tmp_path) is bool(unfit)
        assert len(list(tmp_path.iterdir())) == 2 * len(unfit)


def test_a_package_without_a_wheel_for_this_machine_is_told_from_an_install_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    why = why_not("no-such-package-anywhere==1")
    assert why is not None
    assert "no-such-package-anywhere==1 has no wheel for" in why
    assert reason("ray", "ERROR: Could not install packages due to an OSError: No space left on device") is None
    unreachable = "WARNING: Retrying: Failed to establish a new connection\nERROR: No matching distribution found for ray"
    assert reason("ray", unreachable) == "no package index can be reached, so ray cannot be installed"


def test_the_lock_has_a_version_of_every_direct_dependency_and_names_no_place() -> None:
    locked = Path("requirements.lock").read_text()
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    versions = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", locked, re.MULTILINE))
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split("[<>=]", name)[0].lower() for name in wanted}
    assert names <= versions.keys()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", Path("constraints.txt").read_text(), re.MULTILINE))
    assert pinned.items() <= versions.items()
    assert all(re.match(r"[\w.-]+==\S+( ; .*)?$", line) for line in locked.splitlines())


def test_versions_that_cannot_be_had_are_reported_and_give_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def with_uv(what: str, versions: str) -> bool:
        asked.append((what, versions))
        return versions == "constraints.txt"

    monkeypatch.setattr(install, "with_uv", with_uv)
    monkeypatch.setattr(install, "LIBRARY_APART", ())
    assert install._installed(".[dev]") == 0
    assert asked == [(".[dev]", "requirements.lock"), (".[dev]", "constraints.txt")]
    assert "requirements.lock" in capsys.readouterr().out
    assert install._installed(".[bench]") == 0
    assert asked[2:] == [(".[bench]", "constraints.txt")]


def test_who_logs_to_tensorboard_need_not_install_wandb() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert (extras["tensorboard"], extras["wandb"]) == (["tensorboard"], ["wandb"])
    assert extras["loggers"] == ["sensorium[tensorboard,wandb]"]


@pytest.mark.parametrize("forbidden", ["1", ""])
def test_packages_are_compiled_where_commands_would_have_to(
    forbidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", forbidden)
    (tmp_path / "module.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("x = = 1\n")
    assert compile_packages(tmp_path) == bool(forbidden)
    assert bool(list(tmp_path.glob("__pycache__/module.*.pyc"))) == bool(forbidden)
