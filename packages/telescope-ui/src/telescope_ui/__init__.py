"""One local page that shows what runs did; `telescope_ui.web.serve.serve` starts its server.

The run folders are only read. What is computed from them lives in the user's cache folder.
"""
