"""An OpenAI-compatible HTTP server around one `LLM`. A request's text does not depend on the load.

    app        assembly and process                 guard      API keys, host names, body limits
    routes     the endpoints                        pages      the page's static files
    requests   schema, and its parsing              responses  OpenAI objects, whole or as events
    responses_api  OpenAI's Responses               reference  the API's reference as a page
    tools      a request's tools, as a grammar      validation sentences for what the schema refuses
    jobs       requests, their choices and text     worker     jobs into messages, messages into text
    messages   what both sides tell each other      links      to an engine on a thread or in a process
    host       the one thread that drives the engine, and its queue
    notes      steps for traces, copied there       tracing    traces, streamed and recorded
    telemetry  Prometheus, log, spans               async_llm  the library for an event loop, without HTTP

HTTP and text are on one side of `messages`, the engine is on the other: only `host` and `notes` call it. The package
needs the `serve` extra; the library does not.
"""
