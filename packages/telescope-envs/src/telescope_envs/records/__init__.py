"""Records that are read and written: of registries, locks, installations, links and projects."""
