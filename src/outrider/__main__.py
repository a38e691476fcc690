"""`python -m outrider` is `outrider`."""

from .cli.app import main

main()
