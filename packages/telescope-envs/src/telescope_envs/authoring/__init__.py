"""What an author does: begin a project, build its wheel, publish it, take a release back."""
