"""Audits of reducers, after BTARD (Gorbunov et al., arXiv 2106.11257): signatures, drawn parts, the verdict.

    sender    signs its parts, eight with one signature, and names a hash of a secret
    reducer   keeps the inputs of its parts, and signs for each: this average comes of these inputs
    auditor   draws parts by its secret and the reducer's signature, fetches their inputs, computes the average again

No network in here: streams and calls are in `round/auditing.py`.
"""
