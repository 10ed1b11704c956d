"""Models: layers joined with attention, one file per family."""
