"""What is read and written: the records of registries, locks, installations, links and projects."""
