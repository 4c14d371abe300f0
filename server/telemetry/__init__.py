"""What an operator sees: Prometheus metrics and log lines.

Who calls: whatever has something to count or to say. ``metrics`` holds every series in one registry of a server; gauges about the
present are read from the scheduler when somebody looks. ``logs`` decides how a line looks, text or JSON.
Who owns what: the `metrics.Metrics` of a process belongs to who made it; nothing here calls back into the server.
"""
