"""Captures echelon's log messages in a list, for processes without pytest and for objects that outlive a call."""

import logging


class LogLines(logging.Handler):
    """Collects every message of echelon's loggers in `lines`, until it is closed or the test ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("echelon")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def close(self) -> None:
        logging.getLogger("echelon").removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
