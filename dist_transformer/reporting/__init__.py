"""Figures and pages about runs, made from the files in their folders and from arrays; without torch."""
