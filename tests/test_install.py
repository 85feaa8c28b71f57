"""Set-up: uv looks for packages where pip is told to look."""

from pathlib import Path

import pytest

from tools.install import settings_for_uv, settings_of_pip, unloadable
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
