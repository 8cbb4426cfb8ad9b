"""What survives the death of a process."""
