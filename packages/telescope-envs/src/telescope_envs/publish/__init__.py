"""From a project to a release: create, build, push, yank and deprecate."""
