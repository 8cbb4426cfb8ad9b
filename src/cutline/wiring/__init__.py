"""Which adapter stands behind which port: flows are checked, recovered and started here."""

from cutline.wiring.flows import load_options, run_on, start_flow
from cutline.wiring.stores import store_at

__all__ = ["load_options", "run_on", "start_flow", "store_at"]
