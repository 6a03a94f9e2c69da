"""The server: addresses of pages, access control, live events, and export to a folder."""
