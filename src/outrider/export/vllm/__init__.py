"""Outrider inside vLLM, through vLLM's own plug-ins: a proposer class, a stat logger, routes, a worker extension.

Nothing of vLLM is patched, and no other part of Outrider imports the plug-ins, so vLLM need not be installed.
"""

LEAST, BELOW = (0, 32), (0, 33)  # the versions of vLLM that the tests ran with


def version_warning(version: str) -> str:
    """A sentence where vLLM is not one of the tested versions; else empty."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if LEAST <= numbers < BELOW:
        return ""
    least, below = (".".join(map(str, each)) for each in (LEAST, BELOW))
    return f"vLLM is {version}; Outrider was tested with {least} up to, but not including, {below}."
