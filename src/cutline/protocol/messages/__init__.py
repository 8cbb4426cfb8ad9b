"""Events and actions of the pure machines, and what crosses a process boundary."""
