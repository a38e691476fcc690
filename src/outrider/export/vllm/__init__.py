"""Outrider inside vLLM, through vLLM's own plug-ins: a proposer class, a stat logger, routes, a worker extension.

Nothing of vLLM is patched. Where vLLM is not installed, only its users notice: no other part of Outrider imports this.
"""

LEAST, BELOW = (0, 32), (0, 33)  # the versions of vLLM that the tests ran with
