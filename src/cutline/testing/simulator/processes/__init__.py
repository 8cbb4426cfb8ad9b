"""What dies: the processes of a flow."""
