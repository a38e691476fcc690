"""How passes are run: the same `launch` and `wait` on every device."""
