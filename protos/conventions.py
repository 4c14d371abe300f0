"""What both ends of a gRPC connection agree on beside the protos."""

MESSAGE_LIMIT = 64 * 2**20  # bytes of one message, in both directions
ACCEPTED = "preheat-accepted"  # initial metadata of a Decode call that was checked and queued
ERROR = "preheat-error"  # trailing metadata of a failed call: a JSON object of type, code, param and retry_after
KEEPALIVE_SECONDS = 60  # of silence, after which a client asks whether the server is still there
