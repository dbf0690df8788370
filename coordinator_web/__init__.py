"""The dashboard: one page that shows a run as one peer of it sees it, and the JSON behind it.

`source` says what it shows and is light to import; `app` and `server` load the web framework.
"""
