"""What speculation brings, measured: bench, tune, doctor, cost, verify, the server audit and the load generator.

Promise: plain and speculative runs are interleaved and counted by one counter; numbers come with the machine they were
measured on. It stands on the library's front door and prints nothing.
"""
