"""``import sensorium`` costs nothing: neither torch nor anything else that is slow is imported before it is needed."""

import subprocess
import sys

import pytest

import sensorium as sn

HEAVY = ("torch", "transformers", "numpy", "pydantic", "av", "PIL", "datasets", "pandas", "rich", "yaml")


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_sensorium_imports_nothing_heavy() -> None:
    assert not loaded_after("import sensorium").intersection(HEAVY)


def test_naming_train_and_load_imports_no_torch() -> None:
    code = "import sensorium as sn; sn.train; sn.load; sn.evaluate; sn.resume; sn.Run; dir(sn)"
    assert not loaded_after(code).intersection(("torch", "transformers"))


def test_every_public_name_is_there() -> None:
    assert all(hasattr(sn, name) for name in sn.__all__)
    assert set(sn.__all__) <= set(dir(sn))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        sn.trian  # noqa: B018
