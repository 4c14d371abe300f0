"""From an accepted request to its last token.

Who calls: the gRPC door and ``preheat generate`` submit a `request.GenerateRequest` with a sink, from any thread.
What goes through: a `sequence.Sequence` per sample waits in the scheduler's queue, is prefilled, inserted and decoded; its
tokens go to the detokenize thread, and from there as text to the sink.
Who owns what: one lock, in `in_flight.InFlight`, guards the scheduler and decides how a request ends. The generate thread alone
touches the decode state; the prefill thread owns a prefix until it hands it over; the detokenize thread alone speaks to sinks.
``scheduler``, ``pages``, ``prefix_cache``, ``turns`` and ``transcript`` are plain Python without threads and without JAX.
"""
