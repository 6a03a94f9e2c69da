"""The server: addresses of pages, who may ask, what is live, and the same pages as a folder."""
