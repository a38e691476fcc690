"""What speculation gains, measured: bench, tune, doctor, cost, verify, the server audit and the load generator.

Promise: plain and speculative runs are interleaved and counted by one counter; every number comes with the machine it
was measured on. The folder stands on the library's front door: it knows neither the command line nor the server, and
it prints nothing. Three words for three things: pass costs are seconds of a target pass, a tuning profile is what
`outrider tune` wrote, a price is money.
"""
