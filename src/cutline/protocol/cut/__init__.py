"""How far an operator may read, and when it cuts."""
