"""Messages between coordinator and operators, and what a shell asks of a running flow."""
