"""`python -m outrider` is `outrider`."""

from .cli import main

main()
