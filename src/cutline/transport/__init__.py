"""Messages between coordinator, workers and shells: mailboxes, wires, request files."""
