"""`swarm doctor`: looks at all that a peer needs, and says of each thing that is wrong what helps.

`finding` is what a check says, `computer`, `run`, `network` and `homes` are the checks, `verb` the command. A check is
a plain function from a Context to its findings; it changes nothing.
"""
