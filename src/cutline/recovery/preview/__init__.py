"""What a restore would do, found out by the rules of a start, also while the flow runs. Reads only."""
