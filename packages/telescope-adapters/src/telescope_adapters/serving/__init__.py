"""Our environments served to other frameworks, in a process that somebody else started."""
