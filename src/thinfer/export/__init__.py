"""Models in the file formats of other programs."""
