"""The command line `ckpt`: the only room where click and rich are allowed.

A command parses, makes one call of the library and renders the result. Results go to stdout; progress,
notes and errors go to stderr.
"""
