"""The package that SmolVLM's processor writes numbers in words with; transformers makes no such processor without it."""

from importlib.util import find_spec

from sensorium.vocabulary.errors import ModelError


def require_number_words() -> None:
    """Refuse to go on where num2words is not installed."""
    if find_spec("num2words") is None:
        raise ModelError(
            "a SmolVLM model needs the package num2words: its processor writes how many frames a video has in words. "
            "Install it: pip install 'sensorium[smolvlm]'."
        )
