"""What a request may say, before any model is asked.

Who calls: the proxy, for JSON; the gRPC door, for every ``DecodeRequest``; ``preheat generate``, for its flags.
What goes through: a mapping of names to values comes in, `fields.RequestFields` goes out, or `server.errors.InvalidRequest`
that names the field.
Who owns what: ``fields`` owns the description of every field, once: its names, type, range, default, where it is allowed, its number
in the proto and its documentation (``description`` says what a description is). ``parsing`` checks requests by it, ``field_types`` and
``chat_types`` one value each; ``decode_fields`` maps fields to a ``DecodeRequest`` and back; ``document`` writes the tables of
``docs/api.md`` and the fields of the proto; ``peer_fields`` has what other servers know and this one does not.
Nothing here keeps state or knows a model; what needs one is in ``server/orchestrator/validation.py``.
"""
