"""Transformers without its progress bars and its report of a load: those are steps of our own displays."""

import logging as standard_logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no report inside; afterwards as before."""
    shown = logging.is_progress_bar_enabled()
    reporter = standard_logging.getLogger("transformers.modeling_utils")
    logging.disable_progress_bar()
    reporter.addFilter(_no_report)
    try:
        yield
    finally:
        reporter.removeFilter(_no_report)
        if shown:
            logging.enable_progress_bar()


def _no_report(record: standard_logging.LogRecord) -> bool:
    """False for the report of a load, unless it is the only place that tells why the load fails."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or "CONVERSION" in text
