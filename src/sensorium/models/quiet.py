"""Transformers without its progress bars and its report of a load: those are steps of our own displays.

Nor does it write out configs for log lines that nobody sees: each is compared with a default one first, which took a
third of the time that a small model needs to load.
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
    """No progress bars and no report inside, and configs are told by the name of their class; afterwards as before."""
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
    """False for the report of a load, unless it is the only place that tells why the load fails."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or "CONVERSION" in text


def _shortened(whole: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda config: f"<{type(config).__name__}>" if _UNSEEN.get() else whole(config)


for _config_class in (PreTrainedConfig, GenerationConfig):
    _config_class.__repr__ = _shortened(_config_class.__repr__)
