"""An OpenAI-compatible server around one `LLM`: many requests, one engine, the same text whatever the load.

    guard      who may ask, and how much        protocol   what a request may say
    asked      a request in the library's words worker     the one thread that drives the engine
    routes     the endpoints                    answers    what is said back
    pages      the page's files                 live       a request's own trace, as it happens
    metrics, traces, logs                       what can be known afterwards

Only `worker` touches the engine. Everything here needs the `serve` extra; the library does not.
"""
