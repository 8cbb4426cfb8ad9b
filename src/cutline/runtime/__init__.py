"""Which adapter stands behind which port: flows are checked, recovered and started here."""
