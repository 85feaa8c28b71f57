"""transformers without its progress bars and loading reports: our own displays show those.

Nor does it render configs for log lines that nobody sees: comparing each with a default config took a third of the loading
time of a small model.
"""

import logging as standard_logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

_UNSEEN: ContextVar[bool] = ContextVar("unseen", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no report inside, and configs are shown by the name of their class."""
    shown = logging.is_progress_bar_enabled()
    reporter = standard_logging.getLogger("transformers.modeling_utils")
    logging.disable_progress_bar()
    reporter.addFilter(_no_report)
    before = _UNSEEN.set(logging.get_verbosity() > logging.INFO)
    try:
        yield
    finally:
        _UNSEEN.reset(before)
        reporter.removeFilter(_no_report)
        if shown:
            logging.enable_progress_bar()


def _no_report(record: standard_logging.LogRecord) -> bool:
    """False for a loading report, unless it is the only explanation of a failed load."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or "CONVERSION" in text


def _shortened(whole: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda config: f"<{type(config).__name__}>" if _UNSEEN.get() else whole(config)


for _config_class in (PreTrainedConfig, GenerationConfig):
    _config_class.__repr__ = _shortened(_config_class.__repr__)
