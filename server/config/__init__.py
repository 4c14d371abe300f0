"""The options of the commands.

Who calls: ``server/commands/cli.py``, once; everybody reads what comes out, a frozen dataclass.
What goes through: texts from the command line, the environment and a TOML file; ``options`` takes each value from the first of
them that has it and parses it, ``commands`` says which options there are and what an absent one means.
Who owns what: nothing is kept; the same texts always make the same configuration, and so the same programs.
"""
