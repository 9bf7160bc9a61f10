"""The messages that cross a seam. Imports nothing of Octavo but the errors, and never torch."""
