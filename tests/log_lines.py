"""What echelon logs, as a list of messages: for processes without pytest, and for objects that live through a test."""

import logging


class LogLines(logging.Handler):
    """Keeps in `lines` every message that is logged below `echelon`, until it is closed or the test ends."""

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
