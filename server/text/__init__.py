"""Text and tokens.

Who calls: the gRPC door (tokenize, render a chat, compile a grammar), the orchestrator (detokenize, stop strings, masks) and the
proxy (tool calls in an answer).
What goes through: text becomes token ids and back (``tokenizers``), messages become a prompt (chat templates), a schema or a
grammar becomes masks (``guided``), pieces of an answer become content and calls (``tool_parser``).
Who owns what: a tokenizer is shared by all threads and never changes; detokenizers, matchers and parsers belong to one sample.
Nothing here imports JAX.
"""
