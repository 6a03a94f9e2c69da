"""One local page that shows what runs did; `telescope_ui.web.serve.serve` starts its server.

The run folders are only read. Computed data is kept in the user's cache folder.
"""
