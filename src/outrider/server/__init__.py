"""An OpenAI-compatible HTTP server around one `LLM`. A request's text does not depend on the load.

    app        assembly and process                 guard      API keys, host names, body limits
    routes     the endpoints                        pages      the page's static files
    requests   schema, and its parsing              responses  OpenAI objects, whole or as events
    jobs       requests, their events and queue     worker     the one thread that drives the engine
    telemetry  Prometheus, log, spans               tracing    traces, streamed and recorded

Only `worker` calls the engine. The package needs the `serve` extra; the library does not.
"""
