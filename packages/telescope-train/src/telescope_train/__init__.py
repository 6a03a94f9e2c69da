"""The trainer of Telescope: `docs/explanation/story-of-a-step.md` follows one step through it."""
