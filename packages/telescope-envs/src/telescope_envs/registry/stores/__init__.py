"""Where the files of a registry are: one store per kind of place, behind `registry.store`."""
