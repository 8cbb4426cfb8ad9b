"""The settings of a demo run."""

from __future__ import annotations

from pathlib import Path

import msgspec

#: Seven of ten payments are made by card, three by UPI: two sources with different rates.
_CARD_SHARE = 0.7
FLOW_NAME = "payments"


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the worker must know, passed to it as JSON."""

    folder: str
    rows: int
    keys: int
    seed: int
    interval: str
    mode: str
    #: Target duration of the input, which sets the sources' rate.
    seconds: float
    #: The remote tier; "": none.
    remote: str = ""
    remote_options: dict[str, str] = {}

    @property
    def card_rows(self) -> int:
        return int(self.rows * _CARD_SHARE)

    @property
    def upi_rows(self) -> int:
        return self.rows - self.card_rows

    @property
    def storage(self) -> Path:
        return Path(self.folder) / "storage"

    @property
    def totals_table(self) -> Path:
        return Path(self.folder) / "totals"

    @property
    def ledger(self) -> Path:
        return Path(self.folder) / "ledger"
