"""What a process that runs flows adds to them: several flows side by side, and their figures over HTTP."""
