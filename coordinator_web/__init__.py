"""The dashboard: pages that show a run as one of its peers sees it, and the JSON behind them.

`app` and `server` load the web framework; the others are light to import.
"""
