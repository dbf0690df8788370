"""Audits of reducers, after BTARD (Gorbunov et al., arXiv 2106.11257): signatures, drawn parts, the verdict.

    sender    signs its parts, and names a hash of a secret
    reducer   signs for each of its averages that it follows from these inputs
    auditor   draws parts by its secret and the reducer's signature, fetches their inputs from the senders, computes the
              average again

No network in here: streams and calls are in `round/auditing.py`.
"""
